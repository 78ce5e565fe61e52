"""The mathematics of the algorithms: records in, records or losses out. No collectives, no models, all in float32.

Letters: B rows, T next-token positions, N valid tokens of a flat batch.
"""
