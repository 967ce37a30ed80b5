"""The learning side of Riacho: a fold over the event log that trains and publishes adapter versions.

Never imports litestar; of `app` it uses the events, the registry and the shared settings.
"""
