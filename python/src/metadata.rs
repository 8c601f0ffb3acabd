//! Metadata, as pairs in Python and as headers.

use http::{HeaderMap, HeaderName, HeaderValue};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyString, PyTuple, PyType};
use tonic::metadata::{BinaryMetadataValue, KeyAndValueRef, MetadataMap};

/// Headers of the transport. Applications neither see nor set them.
const OWN: [&str; 9] = [
    "te",
    "content-type",
    "grpc-timeout",
    "grpc-encoding",
    "grpc-accept-encoding",
    "grpc-status",
    "grpc-message",
    "date",
    "connection",
];

/// Adds the pairs of `metadata` to `headers`.
///
/// # Errors
/// The argument is no sequence of pairs, or a key or a value can't be sent.
pub(crate) fn add(headers: &mut HeaderMap, metadata: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    let Some(metadata) = metadata else { return Ok(()) };
    for pair in metadata.try_iter()? {
        let pair = pair?;
        let wrong =
            || PyTypeError::new_err(format!("metadata was invalid: {pair} is no pair of a key and a value"));
        // A subclass of tuple is a pair, too.
        let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = pair.extract().map_err(|_| wrong())?;
        let key = match key.cast::<PyBytes>() {
            Ok(key) => String::from_utf8_lossy(key.as_bytes()).into_owned(),
            Err(_) => key.extract().map_err(|_| wrong())?,
        };
        let mistyped =
            |why: &str| PyTypeError::new_err(format!("metadata was invalid: the key {key:?} {why}"));
        let invalid =
            |why: &str| PyValueError::new_err(format!("metadata was invalid: the key {key:?} {why}"));
        if OWN.contains(&key.as_str()) {
            return Err(invalid("is the transport's own"));
        }
        if key.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(invalid("has upper-case letters"));
        }
        let name = HeaderName::from_bytes(key.as_bytes()).map_err(|_| invalid("is no name of a header"))?;
        let value = if key.ends_with("-bin") {
            let bytes: PyBackedBytes =
                value.extract().map_err(|_| mistyped("ends in -bin, and its value is not of type bytes"))?;
            HeaderValue::from_bytes(BinaryMetadataValue::from_bytes(&bytes).as_encoded_bytes())
        } else if let Ok(text) = value.cast::<PyString>() {
            HeaderValue::from_bytes(text.extract::<PyBackedStr>()?.as_bytes())
        } else {
            let bytes: PyBackedBytes =
                value.extract().map_err(|_| mistyped("has a value that is neither str nor bytes"))?;
            HeaderValue::from_bytes(&bytes)
        };
        let value = value.ok().filter(|value| key.ends_with("-bin") || value.to_str().is_ok());
        let value = value.ok_or_else(|| invalid("has a value with characters that are not visible ASCII"))?;
        headers.try_append(name, value).map_err(|_| invalid("is one too many"))?;
    }
    Ok(())
}

/// Returns the metadata of an application among `headers`.
pub(crate) fn to_python<'py>(py: Python<'py>, headers: &HeaderMap) -> PyResult<Bound<'py, PyTuple>> {
    // Most calls have none.
    if headers.keys().all(|key| OWN.contains(&key.as_str())) {
        return Ok(PyTuple::empty(py));
    }
    static METADATUM: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let metadatum = METADATUM.import(py, "tonic_rdma._metadatum", "Metadatum")?;
    let map = MetadataMap::from_headers(headers.clone());
    let mut pairs = Vec::new();
    for entry in map.iter() {
        let (key, value) = match &entry {
            KeyAndValueRef::Ascii(key, value) => (
                key.as_str(),
                PyString::new(py, &String::from_utf8_lossy(value.as_encoded_bytes())).into_any(),
            ),
            KeyAndValueRef::Binary(key, value) => match value.to_bytes() {
                Ok(bytes) => (key.as_str(), PyBytes::new(py, &bytes).into_any()),
                Err(_) => continue,
            },
        };
        if !OWN.contains(&key) {
            pairs.push(metadatum.call1((key, value))?);
        }
    }
    PyTuple::new(py, pairs)
}
