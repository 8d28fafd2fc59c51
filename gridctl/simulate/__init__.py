"""Recordings of fleets that do not exist: seeded, with truth. It knows no detector, and no rule of one."""
