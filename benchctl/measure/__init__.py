"""Everything that touches processes and devices: one run, the experiment, and the directory that they write.

``measured_run`` is shared by runs of an experiment (``run``, ``experiment``) and by ``single_load``. ``server``
starts and ends processes, ``telemetry`` samples devices, and ``doctor`` checks the machine.
"""
