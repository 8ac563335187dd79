"""Plugins without a package, for tests that open data."""


class NoPlugins:
    """Plugins that bring no prompts, or the sources they were given by task."""

    def __init__(self, **sources):
        self.sources = sources

    def prompts(self, task, ctx):
        return self.sources.get(task.name)

    def messages(self, messages, tools, prompt, ctx):
        return messages, tools

    def takes_replies(self, task, config):
        return config.train.offline

    def replaces_rollout(self, task, config):
        return bool(config.rollout.rollout_function_path)

    def generates_itself(self, task, config):
        return False
