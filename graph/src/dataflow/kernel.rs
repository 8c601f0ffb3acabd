//! What an engine has to offer.

use std::error::Error;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tonic_rdma_tensor::{Tensor, TensorSpec};

/// An error of an engine.
pub type KernelError = Box<dyn Error + Send + Sync>;

/// A tensor of an engine. Clones share its content.
pub trait Value: Clone + Send + Debug + 'static {
    /// Returns the tensor in the form in which it crosses. The result shares the content, and keeps it unchanged while it lives. An
    /// engine whose tensor is not row-major may copy it.
    ///
    /// # Errors
    /// The type of the elements can't cross.
    fn share(&self) -> Result<Tensor, KernelError>;

    /// Makes a tensor of `spec` in the memory of the engine. `fill` writes its content, row-major, and writes every byte.
    ///
    /// # Errors
    /// The engine has no tensor of this type, or `fill` failed.
    fn filled(
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), KernelError>,
    ) -> Result<Self, KernelError>;
}

/// The computation of a node.
pub trait Kernel<V>: Send {
    /// Computes the outputs of the node in a step. An input that is not used elsewhere may be changed in place. Several steps may be
    /// under way. Each node sees them in ascending order.
    ///
    /// # Errors
    /// The inputs have a wrong type or shape, or the engine failed.
    fn run(&mut self, step: u64, inputs: Vec<V>) -> Result<Vec<V>, KernelError>;
}

impl<V, F> Kernel<V> for F
where
    F: FnMut(u64, Vec<V>) -> Result<Vec<V>, KernelError> + Send,
{
    fn run(&mut self, step: u64, inputs: Vec<V>) -> Result<Vec<V>, KernelError> {
        self(step, inputs)
    }
}

/// Calls an engine or the program. A panic becomes an error. `who` has panicked, for the message.
pub(crate) fn guarded<R>(
    who: &str,
    call: impl FnOnce() -> Result<R, KernelError>,
) -> Result<R, KernelError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Err(format!("{who} panicked: {}", text.unwrap_or("without a message")).into())
    })
}
