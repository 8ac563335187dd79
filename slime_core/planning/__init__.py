"""What a run will take, by arithmetic alone: memory of each GPU by component and phase, seconds of a step, settings.

Nothing is started, no weights are read and torch is not imported: a config and a model's config.json suffice.
"""
