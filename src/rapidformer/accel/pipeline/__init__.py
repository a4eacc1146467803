"""Pipeline parallelism: each rank holds some of a model's blocks, micro-batches pass through.

Read in this order: ``layout`` (which blocks form a stage, and on which rank), ``discovery`` (where
parameters outside blocks are used), ``cut`` (which parameters stay here), ``gates`` (what a block
does while a stage runs), ``schedule`` (torch's schedules on our stages), ``pipeline`` (an update,
and what follows it), ``staged_model`` (a call of the model).
"""
