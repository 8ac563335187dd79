"""See the package."""


def load_plugins() -> None:
    """SGLang's entry points of plugins: none here."""
