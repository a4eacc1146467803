"""AdamW and the gradient's norm in a few kernel launches, whatever the number of tensors.

``MultiTensorAdamW.step`` is all that a loop needs. A CUDA graph of the update takes it apart:

    launch = optimizer.find_launch()        # with gradients in .grad; None: torch's step must run
    launch.prepare()                        # on the host, before every run or replay
    launch.run(divisor, flag)               # on the device: this is what a graph records

``find_launch`` creates missing state: call it once before recording. ``prepare`` writes settings
that have changed to the device, follows weights and moments that moved, and counts the change of
every weight for autograd; False: the launch no longer fits, so drop the graph and find another one.
``run`` takes the gradients in ``.grad``, or those given in the order of ``launch.parameters``,
which must stay where they are, and reads nothing back. ``divisor`` divides them (clipping),
``flag`` is 1.0 if nothing may change; both are fp32 tensors on the device. Run the same
combination, and ``norm.sum_squares``, once before recording: they are compiled then.
"""
