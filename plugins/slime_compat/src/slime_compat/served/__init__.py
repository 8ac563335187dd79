"""Implementations of the modules of THUDM/slime that functions import; see `slime_compat.finder.SERVED`."""
