"""Shards -> what is wrong with them, and what they hold."""

from tarshards.verbs.check.check import check_shards, repair_shards
from tarshards.verbs.check.report import SHOWN, FieldSizes, Finding, Report

__all__ = ["SHOWN", "FieldSizes", "Finding", "Report", "check_shards", "repair_shards"]
