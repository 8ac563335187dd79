"""FSDP2 from one CPU process up."""
