"""slime's command lines and launch scripts: what each flag is here, and the words of `slime run`."""
