"""Pipeline parallelism: each process holds some of a model's blocks, micro-batches pass through.

Read in this order: ``layout`` (which blocks make a stage, and whose it is), ``discovery`` (where
parameters outside of blocks are used), ``cut`` (which parameters stay here), ``gates`` (what a
block does while a stage runs), ``schedule`` (torch's schedules over our stages), ``pipeline`` (an
update, and what follows it), ``staged_model`` and ``relay`` (a call outside of training).
"""
