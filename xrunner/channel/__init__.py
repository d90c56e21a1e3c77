"""The channel between the front and an engine: requests and plans go to the engine. Steps and tokens come back.

The front talks to clients: it has HTTP, tokenizer, templates, metrics and logs, and decides when to re-plan. An engine
has the model: it schedules and executes steps, and knows the front only through this channel. Each runs in a process of
its own, so that neither waits for the other's interpreter lock.

Contract of an engine in the front (`RemoteEngine`; one thread; only `restart` and `close` block):
    submit          token ids and sampling parameters, with deadline, account and the output's limits
    cancel          removes a request
    go_over_to      makes later steps follow another plan; `on_refused` says why it cannot run
    fileno, step    a descriptor that becomes readable, and the tokens of the next step that has ended
    listen          passes the records of steps to a function
    pool, uses      the engine's requests, its K/V memory, and the work of each of its processes
    takes_seeds, scores_prompts             what the engine can do
    resumes, repeats                        how a lost engine's request continues in another engine
    restart         ends the old engine, and starts a new one without requests

`step` raises `EngineLost` if the engine's process has died or hangs. The process counts as hung if it has sent nothing
for `SILENCE_S`, although an engine reports every `ALIVE_S` from its start on, or if it has requests to execute and has
ended no step for `STEP_S`. If the kernel shows that the process works (it imports, compiles, computes, or waits for
processors), the limits are longer: `BUSY_S`, `LONG_STEP_S`. The front then restarts the engine on the last plan that
ran, and submits each request again with the tokens that its client already has (`xrunner.server.handover`). No request
is lost, and no token is sent twice.

The channel carries frames of msgpack over Unix sockets (`ends`, `messages`): one frame for each step, however many
tokens the step has. With 128 streams a step takes 7 us to encode and 20 us to decode, and wakes the front once. An
engine's process ends when its socket is closed; the kernel closes it when the front ends.
"""

from xgpt.core.errors import MachineError

ALIVE_S, SILENCE_S = 1.0, 15.0
"""Interval between reports that an engine is alive, and time without one after which it counts as hung, in seconds."""
BUSY_S = 60.0
"""Longest time without a report, in seconds, for an engine whose process works according to the kernel."""
STEP_S, LONG_STEP_S = 120.0, 1800.0
"""Longest time without the end of a step, in seconds, for an engine with requests, and for one whose process works
according to the kernel.
"""


class EngineLost(MachineError):
    """The engine's process has died or hangs, and its requests are lost with it. It may be restarted."""
