"""Two agents: a writer who learns, and a critic who does not; each has a reward of its own."""

import verifiers.v1 as vf


class TwoVoicesConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class TwoVoicesEnv(vf.Env[TwoVoicesConfig]):
    async def setup(self, agents):
        agents.critic.trainable = False

    async def run(self, task, agents):
        draft = await agents.writer.run(task)
        await agents.critic.run(task.with_data(prompt=draft.last_reply))

    async def finalize(self, task, episode):
        for trace, value in zip(episode.traces, (1.0, 0.25), strict=True):
            trace.record_reward("agreement", value)


class TwoVoicesTaskset(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    def load(self):
        return [vf.Task(vf.TaskData(prompt=word), self.config.task) for word in ("a", "b")]


__all__ = ["TwoVoicesEnv", "TwoVoicesTaskset"]
