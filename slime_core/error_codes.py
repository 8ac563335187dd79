"""Every error code: what it means, and the exit code of the command that ends with it.

`slime explain CODE` prints an entry, `slime explain --markdown` the tables of docs/errors.md. The letters name the
part of slime; the class of the error (`slime_core.errors`) belongs to them.
"""

from __future__ import annotations

PARTS = {
    "SLM": (1, "slime itself, or a run as a whole"),
    "RUN": (75, "a run that was stopped on request: nothing is wrong, and `slime run --resume` continues it"),
    "HNG": (9, "a process that hangs"),
    "CFG": (2, "the recipe, the command line or the environment; nothing was started"),
    "DAT": (3, "rows and files of data; `slime data check FILE` lists every row that cannot be used"),
    "TOK": (3, "the model folder: tokenizer, chat template, weights"),
    "PLG": (4, "a plugin, or a function by path; `slime plugins check NAME` runs its contract suite"),
    "ENG": (5, "the rollout engine, and servers that a run talks to"),
    "TRN": (6, "the trainer"),
    "STO": (7, "the run directory, ledger and checkpoints; `slime show RUN` says what is there"),
    "SBX": (8, "the sandbox; `slime doctor -v --plugin sandbox` shows its layers"),
}
"""Letters of a code: the exit code, and which part of slime it is about."""

EXITS = {"CFG10": 0, "TOK40": 5, "TOK44": 5}
"""Codes whose exit code is not that of their letters."""

MEANINGS = {
    "SLM00": "an internal error, or an error without a specific code",
    "SLM01": "the driver of a detached run failed too often, or its cluster was lost",
    "RUN75": "the run was stopped with a checkpoint",
    "HNG125": "a process made no progress for `hang_timeout` seconds; one page shows which process waits for which",
    "CFG00": "an invalid command line",
    "CFG01": "a key, table, option or command that does not exist",
    "CFG02": "a value of the wrong type, or a required one that is missing",
    "CFG03": "a value out of range",
    "CFG04": "keys that contradict each other, a backend that is not installed, or a required key that is not set",
    "CFG05": "a file, folder, recipe or run that does not exist",
    "CFG06": "text that is not TOML or not UTF-8",
    "CFG07": "a key or table given twice",
    "CFG08": "a recipe that is too large or nested too deeply",
    "CFG09": "an environment variable that is not set",
    "CFG10": "a warning: a secret pasted in a recipe or a command line",
    "CFG11": "a recipe of another schema version",
    "CFG12": "the run directory holds another run or other files",
    "CFG13": "keys of a resumed run changed in a way that makes it another experiment",
    "CFG14": "nothing to resume: no checkpoint and an empty ledger",
    "CFG15": "a number that is not finite",
    "CFG16": "another process runs in the run directory",
    "CFG17": "no Ray cluster at the address, one of another version, or one whose head was lost",
    "CFG18": "a Ray cluster that is too small for the run",
    "CFG19": "a file in `ray_py_modules` that is not a wheel, or a wheel with another version of a plugin than the"
    " run has loaded",
    "CFG20": "a run directory in a folder that Ray removes with its job",
    "CFG200": "an architecture that no loaded plugin has a bridge for, or that transformers does not read from a "
    "GGUF file",
    "DAT00": "data that cannot be used",
    "DAT17": "no rows, or no valid one",
    "DAT18": "a column that the config names is missing",
    "DAT19": "a line that is not JSON, or a file that is not JSONL",
    "DAT20": "bytes that are not UTF-8, or NUL bytes",
    "DAT21": "a line longer than `max_line_bytes`",
    "DAT22": "ids that occur twice",
    "DAT24": "a value of the wrong type in a row",
    "DAT25": "a chat message without role or content, or that the template refuses",
    "DAT26": "a prompt longer than the limit",
    "DAT27": "every row was dropped",
    "DAT28": "too few rows for a step",
    "DAT29": "the data changed since the run was saved; two evaluations of different questions",
    "DAT30": "a compressed, truncated or damaged file, also of an evaluation record",
    "DAT31": "NaN, Infinity or duplicate keys in JSON",
    "DAT32": "JSON nested too deeply",
    "DAT33": "media outside the data's folder",
    "DAT34": "an id that looks like a path",
    "DAT35": "a number with too many digits",
    "DAT36": "text that is not valid Unicode",
    "DAT37": "the file changed, shrank or disappeared during the run",
    "DAT38": "pictures or videos that do not match their placeholders",
    "DAT39": "a picture that cannot be read or decoded",
    "DAT40": "a picture or file over the limit",
    "DAT41": "media that the model does not take",
    "TOK00": "a folder that is not a complete model folder",
    "TOK39": "tokenizer and embedding differ in size",
    "TOK40": "a server with another vocabulary or tokenizer than the trained model",
    "TOK41": "a chat template is needed and missing",
    "TOK42": "end-of-text or padding token missing",
    "TOK43": "a chat template or tokenizer that cannot insert text between two answers without changing them",
    "TOK44": "a token id outside the vocabulary in an answer or a batch",
    "TOK45": "the model folder requires its own Python code",
    "TOK46": "weights that are missing, unknown or of another shape",
    "TOK47": "a damaged safetensors or GGUF file",
    "TOK48": "a dtype that cannot be used here",
    "TOK49": "tied weights that are absent or differ",
    "TOK50": "a chat template that does not end, or takes gigabytes",
    "TOK200": "a value in a model's config that the Megatron trainer's layers do not express",
    "TOK201": "a torch_dist checkpoint that is incomplete or damaged",
    "TOK202": "a checkpoint in another format than torch_dist, which only the layout that wrote it can read",
    "TOK203": "metadata of a checkpoint that is a pickle of unknown origin, or that refers to unexpected classes",
    "PLG00": "a plugin broke its contract",
    "PLG50": "a plugin or function could not be imported",
    "PLG51": "a plugin or function that does not exist",
    "PLG52": "two providers of one name, or two implementations of equal rank",
    "PLG53": "a hook or function with the wrong signature",
    "PLG54": "a hook that does not exist, or without its decorator",
    "PLG55": "a plugin for another hook API",
    "PLG56": "a hook, or a function of a backend, raised",
    "PLG57": "a hook returned something of the wrong type",
    "PLG58": "a hook returned a number that is not finite",
    "PLG59": "a hook returned a list of the wrong length",
    "PLG60": "a hook did not return in time",
    "PLG61": "a hook changed its inputs (with `report.check_hooks`)",
    "PLG62": "a hook tried to end the process",
    "PLG64": "a plugin's state that cannot be saved or loaded",
    "PLG65": "the run was saved with other plugins",
    "PLG66": "an async hook where only sync is allowed",
    "PLG67": "an evaluation in which no answer could be judged",
    "PLG70": "a server that a plugin starts does not come up",
    "ENG00": "a rollout engine failed",
    "ENG01": "a request without tokens",
    "ENG02": "a request with a token id outside the vocabulary",
    "ENG03": "impossible sampling parameters",
    "ENG05": "the engine does not fit the memory",
    "ENG06": "the engine was used while its memory is released",
    "ENG07": "pictures that the engine's model cannot take",
    "ENG08": "a placeholder that the model drew lies in the prompt, and the engine would look for its picture",
    "ENG09": "an adapter that the run does not have, or its engine does not serve",
    "ENG69": "a server or the rollout buffer does not respond",
    "ENG71": "the service at the address is not an SGLang server, or not a rollout buffer of this version",
    "ENG72": "a prompt that does not fit the context",
    "ENG73": "a server or the rollout buffer refuses the token",
    "ENG74": "a server stays busy (429, 503)",
    "ENG75": "a server or the rollout buffer keeps failing, or its queues stay full",
    "ENG76": "no complete response from a server in time",
    "ENG77": "a server's response was lost or truncated",
    "ENG78": "a server or the rollout buffer refuses a request",
    "ENG79": "a response whose lists differ in length or ids",
    "ENG80": "log-probs or logits that are impossible or not finite",
    "ENG81": "a server ended a request for an unknown reason, or aborted it without a token",
    "ENG82": "a response that does not match its request",
    "ENG83": "the engine serves the wrong weights",
    "ENG84": "the engine failed, was closed, or its process died, with in-flight requests",
    "ENG85": "a server responds, but produces no tokens for its requests",
    "ENG86": "weights that do not fit the engine",
    "ENG88": "a server's response to another request than the waiting one",
    "ENG89": "too few healthy servers are left after restarts",
    "ENG91": "a server's response that is longer than possible",
    "ENG93": "no connection with a trusted TLS certificate",
    "TRN00": "a trainer failed",
    "TRN95": "a reward, log-prob, loss or gradient that is not finite",
    "TRN96": "out of memory in a pass of the trainer",
    "TRN99": "a group with fewer rollouts than `pass_k`",
    "TRN100": "too many groups in a row were dropped",
    "TRN102": "lengths or shapes that do not fit",
    "TRN104": "reference, teacher or critic differ from the policy in vocabulary or architecture",
    "TRN105": "a trainer rank ended, or was ended after another failed",
    "TRN106": "trainer ranks were given different batches",
    "TRN108": "saved weights of another shape",
    "TRN110": "routed experts that are missing or do not fit the model",
    "TRN115": "pictures for a model that sees none, or a model of pictures whose family the trainer does not know",
    "TRN116": "the base model of adapters is not what it was",
    "TRN131": "the machine has no loopback interface",
    "TRN132": "the machine has too little memory for the run",
    "STO00": "storage cannot be written or read, or samples do not add up",
    "STO109": "the disk is full",
    "STO110": "a path that cannot be written",
    "STO111": "a stored file is gone",
    "STO112": "stored bytes differ from those that were written",
    "STO113": "a file of another schema version",
    "STO116": "another process holds the ledger",
    "STO117": "the ledger is damaged, gone, or has lost commits",
    "STO118": "the ledger would be on a network file system",
    "STO120": "too many open files",
    "STO121": "the device failed",
    "STO200": "the run directory is not the same folder for all trainer ranks",
    "SBX00": "the sandbox's fork server did not start or cannot import its modules; or the GPU cannot be used in it",
    "SBX129": "a module imported by the fork server starts threads",
    "SBX134": "a sandbox level that this machine does not support, or whose self-test fails",
    "SBX140": "the sandbox's fork server died too often",
    "SBX141": "a container for an agent could not be started",
}


def exit_of(code: str) -> int:
    """The exit code of the command that an error with a code ends.

    Example: exit_of("CFG03") == 2
    """
    return EXITS.get(code, PARTS[code[:3]][0])


def anchor(code: str) -> str:
    """Where the documentation has the entry of a code.

    Example: anchor("CFG03") == "docs/errors.md#cfg03"
    """
    return f"docs/errors.md#{code.lower()}"


def markdown() -> str:
    """The tables of docs/errors.md, one for each part, with an anchor for each code."""
    blocks = []
    for part, (_, text) in PARTS.items():
        rows = [
            f'| <a id="{code.lower()}"></a>{code} | {exit_of(code)} | {meaning} |'
            for code, meaning in MEANINGS.items()
            if code.startswith(part)
        ]
        table = ["| code | exit | meaning |", "| --- | --- | --- |", *rows]
        blocks.append("\n".join([f"## {part}", "", f"{text[0].upper()}{text[1:]}.", "", *table]))
    return "\n\n".join(blocks) + "\n"
