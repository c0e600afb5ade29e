"""Memory errors out of a recorded tree."""

from support.fake_root import FakeRoot

from gpuops.host.memory_modules import Edac, MemoryController, read_edac


def test_each_controller_is_read_with_the_modules_that_had_errors(tmp_path):
    root, mc = FakeRoot(tmp_path), "sys/devices/system/edac/mc"
    root.write(f"{mc}/mc0/ce_count", "12\n").write(f"{mc}/mc0/ue_count", "1\n")
    root.write(f"{mc}/mc0/dimm3/dimm_ce_count", "12\n")
    root.write(f"{mc}/mc0/dimm3/dimm_ue_count", "1\n")
    root.write(f"{mc}/mc0/dimm3/dimm_label", "CPU_SrcID#0_MC#0_Chan#1_DIMM#0\n")
    root.write(f"{mc}/mc0/dimm0/dimm_ce_count", "0\n")
    root.write(f"{mc}/mc1/ce_count", "0\n").write(f"{mc}/mc1/ue_count", "0\n")
    root.write(f"{mc}/mc2/ce_count", "vanished\n")
    root.write(f"{mc}/power/ce_count", "9\n").write(f"{mc}/power/ue_count", "9\n")

    assert read_edac(root.path).controllers == (
        MemoryController(
            name="mc0",
            corrected=12,
            uncorrected=1,
            dimms={"CPU_SrcID#0_MC#0_Chan#1_DIMM#0": 13},
        ),
        MemoryController(name="mc1", corrected=0, uncorrected=0),
    )


def test_a_machine_without_a_driver_has_none(tmp_path):
    assert read_edac(tmp_path) == Edac()
