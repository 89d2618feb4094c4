"""A load split over several processes of one host, for servers that one process cannot keep up with.

``workers`` deals out the requests and collects the records; ``worker`` is the program of each process.
"""
