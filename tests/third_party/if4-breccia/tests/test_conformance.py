from breccia.testing import conformance

test_conformance = conformance("if4")
