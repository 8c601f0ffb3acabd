//! Python's memory: the one file of this member with unsafe code.

use bytes::Bytes;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Makes a `bytes` object of `length` bytes, which `chunks` have, and copies them without the interpreter's
/// lock.
///
/// # Errors
/// There is no memory for it.
#[allow(unsafe_code, reason = "PyBytes::new_with would fill the memory with zeros first")]
pub(crate) fn bytes_of<'py>(
    py: Python<'py>,
    chunks: &[Bytes],
    length: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    assert_eq!(chunks.iter().map(Bytes::len).sum::<usize>(), length, "the chunks fill the object");
    // SAFETY: a null pointer asks for an object whose content is not initialised. The object is new, so
    // nothing else has it until this function returns it: Python permits its owner to write its content until
    // then, with or without the lock.
    unsafe {
        let object = ffi::PyBytes_FromStringAndSize(std::ptr::null(), length as ffi::Py_ssize_t);
        let object: Bound<'py, PyBytes> = Bound::from_owned_ptr_or_err(py, object)?.cast_into_unchecked();
        let start = ffi::PyBytes_AsString(object.as_ptr()) as usize;
        py.detach(|| {
            let mut at = start;
            for chunk in chunks {
                std::ptr::copy_nonoverlapping(chunk.as_ptr(), at as *mut u8, chunk.len());
                at += chunk.len();
            }
        });
        Ok(object)
    }
}
