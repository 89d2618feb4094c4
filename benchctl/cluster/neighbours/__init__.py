"""The mutual disturbance of blocks that run at the same time on one host: an A/A experiment with neighbours.

``check`` measures it, ``neighbour`` is the program that is a neighbour, ``children`` starts and ends such programs,
``on_file`` keeps the result and gives it to the experiments that it is about.
"""
