"""Pure functions of the algorithms: numbers in, numbers out, no config objects."""
