"""A foreign array library in miniature: hands out DLPack capsules, old or versioned, made with ctypes.

It stands for the libraries that are not installed here, and can claim what they cannot be made to claim:
another device, another version, read-only memory, a hidden copy.
"""

import ctypes

import numpy

FLOAT, BFLOAT, INT = 2, 4, 0
CPU, CUDA = 1, 2
READ_ONLY, IS_COPIED = 1, 2


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", Deleter)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

capsule_name = ctypes.pythonapi.PyCapsule_GetName
capsule_name.restype = ctypes.c_char_p
capsule_name.argtypes = [ctypes.py_object]


class ForeignArray:
    """`memory` is the numpy array behind it; bfloat16 is handed in as uint16 with code BFLOAT."""

    def __init__(self, memory, code=None, *, versioned=True, major=1, flags=0, device=(CPU, 0), compact=False,
                 byte_offset=0):
        self.memory = memory
        self.code = code if code is not None else (INT if memory.dtype.kind == "i" else FLOAT)
        self.versioned, self.major, self.flags = versioned, major, flags
        self.device, self.compact, self.byte_offset = device, compact, byte_offset
        self.arguments = None  # of the last __dlpack__ call that was served
        self.capsule = None    # of that call
        self.exported = {}     # address of each tensor handed out: what it borrows
        self.deleted = 0

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **arguments):
        if not self.versioned and not set(arguments) <= {"stream"}:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        self.arguments = arguments
        array = self.memory
        size = array.itemsize
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        strides = (ctypes.c_int64 * array.ndim)(*(s // size for s in array.strides))
        tensor = Tensor(array.ctypes.data - self.byte_offset, *self.device, array.ndim, self.code, 8 * size, 1,
                        shape, None if self.compact else strides, self.byte_offset)
        deleter = Deleter(self._delete)
        if self.versioned:
            managed = ManagedVersioned(self.major, 0, None, deleter, self.flags, tensor)
            name = b"dltensor_versioned"
        else:
            managed = Managed(tensor, None, deleter)
            name = b"dltensor"
        self.exported[ctypes.addressof(managed)] = (managed, shape, strides, deleter, name)
        self.capsule = new_capsule(ctypes.addressof(managed), name, None)
        return self.capsule

    def _delete(self, pointer):
        assert pointer in self.exported
        self.deleted += 1


class OutsideLibrary(ForeignArray):
    """With the constructor that PyTorch tensors have, for calls without `out`."""

    def new_zeros(self, shape):
        return OutsideLibrary(numpy.zeros(shape, self.memory.dtype), self.code)
