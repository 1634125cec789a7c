"""Tests of the register, and of whole agents on the fake node: no device is given twice."""
