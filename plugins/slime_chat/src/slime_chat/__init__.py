"""Agents of any kind, written against OpenAI's or Anthropic's API, as samples whose ids and log-probs are exact.

Example:
    from slime_chat import converse


    async def generate(group, ctx):
        async def agent(session):
            process = await asyncio.create_subprocess_exec("my-agent", env={**os.environ, **session.env})
            await process.wait()

        return await converse(group, ctx, agent)
"""

from slime_chat.endpoint import converse as converse, open_session as open_session
from slime_chat.session import Session as Session

__all__ = ["Session", "converse", "open_session"]
