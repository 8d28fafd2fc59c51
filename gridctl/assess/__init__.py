"""What acting now costs against waiting, and which spare is best. Pure."""
