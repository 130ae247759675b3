"""What the tools do, in Python: one file a tool, with the tool's name without ``tar``.

``cat create grep join jsonl lines mix show sort table`` and the package ``check``.
"""
