from breccia.testing import conformance

test_conformance = conformance("hif4")
