//! Handles and requests as messages, and why an owner refuses them.

use std::fmt;

use super::proto::{BufferKey, Fault, FaultKind, Reader, RemoteBuffer};
use crate::error::{TensorError, TensorErrorKind};
use crate::types::{Shape, TensorSpec};

/// Most ranges of one request.
pub(super) const MOST_RANGES: usize = 1 << 16;
/// Bytes of a token, and of the secret of a reader.
pub(super) const SECRET: usize = 16;

impl RemoteBuffer {
    /// Returns type and shape of the tensor, or `None` if the buffer has other bytes.
    ///
    /// # Errors
    /// The handle names a type or a shape that is none, or they don't have the length of the buffer.
    pub fn spec(&self) -> Result<Option<TensorSpec>, TensorError> {
        if self.dtype.is_empty() && self.shape.is_empty() {
            return Ok(None);
        }
        let spec = TensorSpec::new(self.dtype.parse()?, Shape::new(&self.shape)?)?;
        if spec.bytes() != Some(self.length) {
            return Err(TensorError::argument(format!("a buffer of {} bytes for {spec}", self.length)));
        }
        Ok(Some(spec))
    }

    pub(super) fn key(&self) -> BufferKey {
        let Self { generation, id, ref token, .. } = *self;
        BufferKey { generation, id, token: token.clone() }
    }
}

impl fmt::Debug for RemoteBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { owner, generation, id, length, token: _, dtype, shape, xxh3 } = self;
        f.debug_struct("RemoteBuffer")
            .field("owner", owner)
            .field("generation", &format_args!("{generation:#x}"))
            .field("id", id)
            .field("length", length)
            .field("dtype", dtype)
            .field("shape", shape)
            .field("xxh3", xxh3)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for BufferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferKey({:#x}, {})", self.generation, self.id)
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reader({:?})", self.name)
    }
}

impl Fault {
    /// Makes the refusal of a request, for the first buffer in it.
    pub(super) fn new(kind: FaultKind, reason: impl Into<String>) -> Self {
        Self { buffer: 0, kind: kind.into(), reason: reason.into() }
    }

    /// Returns the error of the reader.
    pub(super) fn into_error(self, owner: &str) -> TensorError {
        let kind = match self.kind() {
            FaultKind::Gone => TensorErrorKind::Gone,
            FaultKind::Revoked => TensorErrorKind::Revoked,
            FaultKind::Restarted => TensorErrorKind::Restarted,
            FaultKind::NotPermitted => TensorErrorKind::NotPermitted,
            FaultKind::Busy => TensorErrorKind::Busy,
            FaultKind::OutOfRange => TensorErrorKind::InvalidArgument,
            FaultKind::NoMemory => TensorErrorKind::NoMemory,
            FaultKind::Unspecified => TensorErrorKind::Refused,
        };
        TensorError::of_owner(kind, owner, &self.reason)
    }
}
