"""The outside, one file each. Nothing here decides."""
