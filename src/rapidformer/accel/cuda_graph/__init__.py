"""``--cuda-graph``: replay what a GPU does as CUDA graphs, which launch all kernels at once.

A graph repeats what the device did at fixed places in memory, and no Python. So whatever is
replayed runs first, is recorded, and is compared with itself; its inputs have one of a few sizes;
and code that does more than compute is found beforehand (``models/side_effects``).

Used by all:

- ``capture.py``: torch's recording, and why one failed. ``host_constants.py``: what a recording
  reads from the host. ``snapshot.py``: the state to put back. ``comparing.py``: the rule.
- ``replayed_code.py``: what the code does, and what it depends on: a part of every recording's key.
- ``inputs.py``: a batch, rounded up to a few sizes, at fixed places. ``widths.py``: whether a loss
  allows that, tried under ``trial_modes.py``.

A step of training asks ``graphs.py``, in this order:

1. ``permission.py``, once: may the engine record at all?
2. A whole step, of a loop that we know: ``passes.py`` is what runs, ``recorder.py`` records it and
   compares. On several ranks, ``finishing.py`` updates the weights after the exchange.
3. Or else pieces (``pieces.py``), while the user's code runs as it is: the model's two passes
   (``model_graphs.py``), or else its blocks (``block_graphs.py``), of which some follow each other
   (``chains.py``) and some share memory (``stacks.py``). Both are recorded by
   ``recorded_block.py``; what blocks are given is in ``block_calls.py``. ``finishing.py`` updates.
4. In a script's own loop, ``own_loop.py`` tells the pieces when a pass begins and ends.

Evaluation replays pieces that only go forward (``forward_graphs.py``), and generation the steps of
one token (``decoding.py``).
"""
