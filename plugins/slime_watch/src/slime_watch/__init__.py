"""`slime watch RUN`: a run while it trains, in a terminal or as a live page on this machine."""
