"""SGLang servers behind the Engine protocol; nothing here imports sglang."""
