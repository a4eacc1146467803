"""``--dynamic-shape``: blocks compute on real tokens only; padding is put back after the last.

**Before training**, ``unpadding.py`` extends a model in place and has it tried:

- ``proof.py`` compares a small batch with padding and without: logits and gradients.
- ``stirring.py`` is what that needs: other weights, no chance, and all of it undone.
- ``block_code.py`` notes what the user's code in blocks depends on. While that differs from what
  was tried, batches keep their padding.

**A batch** then meets, in this order:

1. the model's ``forward`` (``unpadding.py``), which asks ``batches.py`` whether padding can be
   removed: labels say what is read, or ``promises.py`` does. ``origin.py`` keeps the mask.
2. ``rows.py``: where the real tokens are, and the way back (``places.py``: both as one copy). An
   encoder-decoder model has two of them (``sides.py``).
3. ``calls.py``: this call, and how to repeat it with padding. ``Removal`` is what is known of a
   model for good.
4. ``kernels.py``: transformers asks for a mask and gets a ``RowMask`` (``masks.py``), by which a
   block knows its rows and attention its kernel.
5. ``blocks.py``: the first block packs its arguments, the last one returns an ``Unpadded``.
6. attention: torch's flash attention, ``short_rows.py`` on a GPU, ``cpu_attention.py`` on a CPU,
   and ``row_attention.py`` as one operator of compiled blocks. ``dropout.py`` draws for CPUs.
7. ``on_demand.py``: whoever reads what the model returns. Operations on each token alone stay
   without padding (``tokenwise.py``), any other runs with NaN for it (``operations.py`` says which
   cannot), and a result that is NaN is computed again with padding.

What batches get so that a few CUDA graphs replay them stands in ``accel/cuda_graph``.
"""
