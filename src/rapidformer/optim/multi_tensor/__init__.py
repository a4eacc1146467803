"""AdamW and the gradient's norm in a few kernel launches, whatever the number of tensors.

``MultiTensorAdamW.step`` is all that a loop needs. A CUDA graph of the update takes it apart:

    launch = optimizer.find_launch()        # with gradients in .grad; None: torch's step must run
    launch.prepare()                        # on the host, before every run or replay
    launch.run(divisor, flag)               # on the device: this is what a graph records

- ``find_launch`` creates missing state. Call it once before recording, as a warm-up step does;
  while recording it only looks up what is there.
- ``prepare`` writes learning rates and other settings to the device if they changed, follows
  weights and moments that moved, and counts the change of every weight for autograd. It returns
  False if the launch no longer fits the optimizer: drop the graph, and find another launch.
- ``run`` launches kernels over the gradients in ``.grad`` (or those given, in the order of
  ``launch.parameters``), which must stay where they are, and reads nothing back. ``divisor``
  divides all gradients (clipping), and ``flag`` is 1.0 if nothing may change; both are fp32 tensors
  on the device. Run the same combination of the two once before recording: it is compiled then.
- ``norm.sum_squares(gradients)`` can be recorded too, after it ran once with such gradients.
"""
