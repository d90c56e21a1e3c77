"""The channel between the front and an engine. Requests and plans go to the engine. Steps and tokens come back.

The front talks to clients: it has HTTP, tokenizer, templates, metrics and logs, and decides when to re-plan. An engine
has the model: it schedules and executes steps, and knows the front only through this channel. Front and engine run in
separate processes, so that neither waits for the other's interpreter lock.

Interface of an engine in the front (`RemoteEngine`; used by one thread; only `restart` and `close` block):
    submit          token ids and sampling parameters, with deadline, account and the output's limits
    cancel          removes a request
    go_over_to      makes later steps follow another plan; `on_refused` is called with the reason if it cannot run
    fileno, step    a descriptor that becomes readable, and the tokens of the next step that has ended
    listen          passes the records of steps to a function
    pool, uses      the engine's requests, its K/V memory, and the work of each of its processes
    takes_seeds, scores_prompts             what the engine can do
    resumes, repeats                        how a lost engine's request continues: after its last token, or anew
    restart         ends the old engine, and starts a new one without requests

`step` raises `EngineLost` if the engine's process has died or hangs. After `EngineLost`, the front restarts the engine
on the last plan that ran, and submits each request again with the tokens that its client already has
(`xrunner.server.lasting_engine`). No request is lost, and no token is sent twice.

The channel carries frames of msgpack over Unix sockets (`ends`, `messages`): one frame for each step, for any number of
tokens. An engine's process ends when its socket is closed. If the front ends, the operating system closes the socket.
"""

from xgpt.core.errors import MachineError

ALIVE_S, SILENCE_S = 1.0, 15.0
"""Interval, in seconds, at which an engine reports that it is alive, and number of seconds without a report after which
it counts as hung.
"""
BUSY_S = 60.0
"""Longest time in seconds without a report from an engine whose process is working."""
STEP_S, LONG_STEP_S = 120.0, 1800.0
"""Longest time, in seconds, for which an engine that has requests may end no step. The second number applies while the
engine's process is working, according to the operating system.
"""


START_SILENCE_S, START_CPU_S = 120.0, 600.0
"""Until an engine is ready, it counts as hung only after this time in seconds without a report and without using a
processor, or after this many processor seconds without a report.
"""


class EngineLost(MachineError):
    """The engine's process has died or hangs, and has lost its requests. The engine may be restarted."""
