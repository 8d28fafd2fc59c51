"""The nouns, as frozen structs. No I/O and no clock: whoever needs the time is given it."""
