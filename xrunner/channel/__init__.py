"""The channel between the front and an engine: requests and plans go down, steps and tokens come up.

The front has the clients: HTTP, tokenizer, templates, metrics, logs, and the decision when to re-plan. An engine has
the model: it schedules and executes steps, and knows nothing of the front but this channel. Each is a process of its
own, so that neither takes the other's interpreter.

Contract of an engine in the front (`RemoteEngine`, one thread, nothing blocks but `restart` and `close`):
    submit          token ids and sampling parameters, with deadline, account and the output's limits
    cancel          takes a request out
    go_over_to      has further steps follow another plan; `on_refused` says why that one does not run
    fileno, step    readable, then the tokens of the next step to end; `listen` gets the records of steps
    pool, uses      the requests inside, K/V memory, and what each of the engine's processes has done
    takes_seeds, scores_prompts             what it can do
    resumes, repeats                        how a request of a lost engine goes on in another
    restart         ends what is left of it, and starts it anew without requests
`step` raises `EngineLost` when the engine's process has died, or hangs: it has sent nothing for `SILENCE_S`, although
it reports every `ALIVE_S` that it is alive, from its start on; or it has requests that no other process executes, and
has ended no step for `STEP_S`. One that is seen to work may take longer (`BUSY_S`, `LONG_STEP_S`): it imports,
compiles, computes, or is short of processors. The front then restarts it on the last plan that has run, and submits
each request again with the tokens that its client has got (`xrunner.server.handover`): none is lost, and no token is
sent twice.

On the wire: frames of msgpack over Unix sockets (`ends`, `messages`), one frame for each step whatever the number of
its tokens. With 128 streams a step takes 7 us to encode and 20 us to decode, and wakes the front once. An engine's
process ends when its socket is closed, as the kernel does when the front ends.
"""

from xgpt.core.errors import MachineError

ALIVE_S, SILENCE_S = 1.0, 15.0
"""Seconds between two reports that an engine is alive, and without any after which it is taken to hang."""
BUSY_S = 60.0
"""Seconds without a report of an engine that is seen to work."""
STEP_S, LONG_STEP_S = 120.0, 1800.0
"""Seconds without the end of a step of an engine that has requests, and of one that is seen to work on them."""


class EngineLost(MachineError):
    """The engine's process has died or hangs, and its requests with it; it may be started anew."""
