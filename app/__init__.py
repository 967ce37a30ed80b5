"""The serving side of Riacho: the API, the capture of traffic and the swap of adapter versions.

Imports without torch, and never imports `learner`.
"""
