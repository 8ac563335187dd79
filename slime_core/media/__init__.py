"""Pictures and videos: references and files, the processor's arrays, their places in a sequence, their features."""
