//! Errors of the libraries as exceptions of Python.

use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use tonic_rdma_collective::{CollectiveError, CollectiveErrorKind};
use tonic_rdma_tensor::{TensorError, TensorErrorKind, TransferError};

/// The classes of `tonic_rdma/_failures.py`.
pub(crate) mod classes {
    use pyo3::import_exception;

    import_exception!(tonic_rdma._failures, TensorError);
    import_exception!(tonic_rdma._failures, Gone);
    import_exception!(tonic_rdma._failures, Revoked);
    import_exception!(tonic_rdma._failures, Restarted);
    import_exception!(tonic_rdma._failures, PeerLost);
    import_exception!(tonic_rdma._failures, TensorTimeout);
    import_exception!(tonic_rdma._failures, CollectiveError);
    import_exception!(tonic_rdma._failures, RankLost);
}

/// An error that Python gets as an exception. It is made without the interpreter's lock.
pub(crate) trait Failure: std::fmt::Debug + Send {
    fn into_exception(self) -> PyErr;
}

impl Failure for PyErr {
    fn into_exception(self) -> PyErr {
        self
    }
}

impl Failure for TensorError {
    fn into_exception(self) -> PyErr {
        use TensorErrorKind as Kind;
        let kind = match self.kind() {
            Kind::InvalidArgument | Kind::InvalidSetting | Kind::Layout => {
                return PyValueError::new_err(self.to_string());
            }
            Kind::NoMemory => return PyMemoryError::new_err(self.to_string()),
            kind => kind,
        };
        let arguments = (self.to_string(), snake_case(kind));
        match kind {
            Kind::Gone => classes::Gone::new_err(arguments),
            Kind::Revoked => classes::Revoked::new_err(arguments),
            Kind::Restarted => classes::Restarted::new_err(arguments),
            Kind::PeerLost => classes::PeerLost::new_err(arguments),
            Kind::Timeout => classes::TensorTimeout::new_err(arguments),
            _ => classes::TensorError::new_err(arguments),
        }
    }
}

impl Failure for TransferError {
    fn into_exception(self) -> PyErr {
        TensorError::from(self).into_exception()
    }
}

impl Failure for CollectiveError {
    fn into_exception(self) -> PyErr {
        use CollectiveErrorKind as Kind;
        let kind = match self.kind() {
            Kind::InvalidArgument | Kind::InvalidSetting => return PyValueError::new_err(self.to_string()),
            Kind::NoMemory => return PyMemoryError::new_err(self.to_string()),
            kind => kind,
        };
        let arguments = (self.to_string(), snake_case(kind), self.rank(), self.lost_rank());
        match self.lost_rank() {
            Some(_) => classes::RankLost::new_err(arguments),
            None => classes::CollectiveError::new_err(arguments),
        }
    }
}

/// Returns the exception of `error`: `result.map_err(to_py)?`.
pub(crate) fn to_py(error: impl Failure) -> PyErr {
    error.into_exception()
}

/// Returns the name of a kind as Python writes it: `peer_lost`.
fn snake_case(kind: impl std::fmt::Debug) -> String {
    let mut name = String::new();
    for letter in format!("{kind:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name
}
