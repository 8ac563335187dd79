"""Written as for THUDM/slime, in the shape of its coding agent: a program in a sandbox, judged in a fresh one."""

import asyncio

from slime.agent import sandbox
from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.harness import ClaudeCodeHarness, CodexHarness
from slime.agent.sandbox import E2BSandbox, Sandbox, exec_and_wait
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.types import Sample

AGENTS = {"claude_code": (ClaudeCodeHarness, AnthropicAdapter), "codex": (CodexHarness, OpenAIAdapter)}
WORKDIR = "/testbed"


async def judge(image, answer):
    async with E2BSandbox(image) as clean:
        assert isinstance(clean, Sandbox)
        await sandbox.ensure_agent_user(clean, WORKDIR)
        await clean.write_file(f"{WORKDIR}/answer.txt", answer, user="agent")
        code, output = await exec_and_wait(
            clean,
            cmd="cat answer.txt missing.txt",
            user="agent",
            workdir=WORKDIR,
            time_budget_sec=60,
            tag="eval",
            want_output=True,
        )
        assert code == 1
        assert "missing.txt" in output
        return output


async def generate(args, base_sample: Sample, sampling_params, evaluation=False):
    row = base_sample.metadata
    harness, kind = AGENTS[row["agent"]]
    adapter = kind(
        tokenizer=GenerateState(args).tokenizer,
        sglang_url=f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
    )
    handle = run_app_in_thread(adapter.app, host="0.0.0.0", port=18001)
    sid = base_sample.session_id = f"agent-{base_sample.index}-{base_sample.group_index}"
    adapter.open_session(sid, sampling_defaults=sampling_params)
    try:
        async with E2BSandbox(row["image"]) as sb:
            await harness().install_cli(sb)
            await sandbox.ensure_agent_user(sb, WORKDIR)
            await sb.write_file(f"{WORKDIR}/TASK.md", base_sample.prompt, user="agent")
            code = await harness().run(
                sb,
                workdir=WORKDIR,
                session_id=sid,
                adapter_url=f"http://127.0.0.1:{handle.port}",
                time_budget_sec=60,
                prompt="Read TASK.md, and don't stop.",
            )
            answer = await sb.read_file(f"{WORKDIR}/answer.txt", user="agent")
            assert await sb.read_file(f"{WORKDIR}/other.txt") == ""
        reward = float((await judge(row["image"], answer)).startswith(base_sample.label))
        return await adapter.finish_session(
            sid, base_sample=base_sample, reward=reward, extra_metadata={"agent_exit_code": code}
        )
    finally:
        await adapter.drop_session(sid)
        await asyncio.to_thread(handle.stop)
