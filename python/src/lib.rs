//! The native part of the Python package `tonic_rdma`. It carries bytes; `grpc`'s API over it is Python.
//!
//! Threads of the runtime never take the interpreter's lock: what they have for Python goes through
//! [`completions`], or to a thread of Python that waits. Threads of Python release the lock for each wait and
//! for each large copy.

#![deny(unsafe_code)]

mod array;
mod buffers;
mod call;
mod channel;
mod communicator;
mod completions;
mod connection;
mod error;
mod framing;
mod memory;
mod metadata;
mod outcome;
mod regions;
mod room;
mod runtime;
mod server;
mod server_call;
mod slots;
mod tensors;
mod waits;

use pyo3::prelude::*;

/// Returns what this process can use: what, whether it is there, and why.
#[pyfunction]
fn capabilities() -> Vec<(String, bool, String)> {
    let mut found = vec![
        ("TLS".to_owned(), true, "ring".to_owned()),
        match cfg!(feature = "ibverbs") {
            true => {
                ("InfiniBand, RoCE and iWARP".to_owned(), true, "built with the feature ibverbs".to_owned())
            }
            false => (
                "InfiniBand, RoCE and iWARP".to_owned(),
                false,
                "built without the feature ibverbs".to_owned(),
            ),
        },
    ];
    let settings = match tonic_rdma::Config::from_env() {
        Ok(_) => (true, "the variables RDMA_* can be used".to_owned()),
        Err(error) => (false, error.to_string()),
    };
    found.push(("settings".to_owned(), settings.0, settings.1));
    found
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(runtime::after_fork_in_child, module)?)?;
    module.add_function(wrap_pyfunction!(capabilities, module)?)?;
    module.add_function(wrap_pyfunction!(array::empty, module)?)?;
    module.add_function(wrap_pyfunction!(array::zeros, module)?)?;
    module.add_function(wrap_pyfunction!(array::asarray, module)?)?;
    module.add_function(wrap_pyfunction!(array::memory_statistics, module)?)?;
    module.add_class::<array::Array>()?;
    module.add_class::<buffers::BufferPool>()?;
    module.add_class::<buffers::BufferLease>()?;
    module.add_class::<buffers::RemoteBuffer>()?;
    module.add_class::<buffers::BufferClient>()?;
    module.add_class::<completions::Completions>()?;
    module.add_class::<waits::Pending>()?;
    module.add_class::<tensors::Device>()?;
    module.add_class::<tensors::TensorChannel>()?;
    module.add_class::<slots::StaticReceiver>()?;
    module.add_class::<slots::DynamicReceiver>()?;
    module.add_class::<slots::StaticSender>()?;
    module.add_class::<slots::DynamicSender>()?;
    module.add_class::<regions::RemoteRegion>()?;
    module.add_class::<regions::ExportedRegion>()?;
    module.add_class::<call::Outcome>()?;
    module.add_class::<connection::Connection>()?;
    module.add_class::<channel::Channel>()?;
    module.add_class::<communicator::Communicator>()?;
    module.add_class::<communicator::Operation>()?;
    module.add_class::<channel::Method>()?;
    module.add_class::<channel::Waiting>()?;
    module.add_class::<call::Call>()?;
    module.add_class::<server::Server>()?;
    module.add_class::<server_call::ServerCall>()?;
    Ok(())
}
