"""A stand-in for the GPU driver, `libcuda.so.1`: as many GPUs as a test wants, of which only the names are real.

Built in a moment by the C compiler. It answers what the launcher asks, and heeds CUDA_VISIBLE_DEVICES as the real one
does: by index or UUID, up to the first that there is not; of MIG instances, the first alone.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int shown[64], count = -1;
static int number(const char *name, int otherwise) { char *text = getenv(name); return text ? atoi(text) : otherwise; }
static void uuid_of(int device, unsigned char *bytes) { memset(bytes, 0, 16); bytes[15] = device; bytes[0] = 0xab; }
int cuDriverGetVersion(int *version) { *version = number("STAND_IN_CUDA", 13020); return 0; }
int cuInit(unsigned flags) {
  int all = number("STAND_IN_GPUS", 8), error = number("STAND_IN_ERROR", 0);
  if (error) return error;
  char *visible = getenv("CUDA_VISIBLE_DEVICES");
  count = 0;
  if (!visible) { for (; count < all; count++) shown[count] = count; }
  else {
    char *copy = strdup(visible);
    for (char *part = strtok(copy, ","); part; part = strtok(NULL, ",")) {
      int found = -1;
      for (int device = 0; device < all; device++) {
        char index[8], uuid[64];
        snprintf(index, 8, "%d", device);
        snprintf(uuid, 64, "%s-ab000000-0000-0000-0000-0000000000%02x", getenv("STAND_IN_MIG") ? "MIG" : "GPU", device);
        if (!strcmp(part, index) || !strcmp(part, uuid)) found = device;
      }
      if (found < 0) break;
      shown[count++] = found;
    }
    free(copy);
  }
  if (getenv("STAND_IN_MIG") && count > 1) count = 1;
  return count ? 0 : 100;
}
int cuDeviceGetCount(int *found) { *found = count; return 0; }
int cuDeviceGet(int *device, int index) { *device = shown[index]; return 0; }
int cuDeviceGetName(char *text, int size, int device) {
  snprintf(text, size, "%s%s", getenv("STAND_IN_MODEL") ? getenv("STAND_IN_MODEL") : "NVIDIA H100",
           getenv("STAND_IN_MIG") ? " MIG 1g.10gb" : "");
  return 0;
}
int cuDeviceGetUuid_v2(unsigned char *bytes, int device) { uuid_of(device, bytes); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  int capability = number("STAND_IN_CAPABILITY", 90);
  *value = attribute == 75 ? capability / 10 : capability % 10;
  return 0;
}
"""


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that shall see eight GPUs."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc to build the stand-in driver with")
    folder = tmp_path_factory.mktemp("driver")
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=_SOURCE, text=True, check=True)
    return {"LD_LIBRARY_PATH": str(folder)}
