"""The load generator: sends requests when they are due and takes the arrival times of answers from the kernel.

``schedule`` decides what is sent when, ``client`` sends and receives, ``answer`` decodes, and ``workers`` splits a
load over processes. Nothing here knows how servers are started or sampled.
"""
