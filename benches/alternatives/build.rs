//! Makes connectrpc's code for the service that `tonic-rdma compare` calls, too. protox replaces protoc.

use std::error::Error;
use std::path::PathBuf;

use buffa_codegen::{BytesRepr, CodeGenConfig};
use prost::Message as _;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=../../proto/transfer.proto");
    let descriptors = PathBuf::from(std::env::var("OUT_DIR")?).join("transfer.bin");
    let set = protox::compile(["transfer.proto"], ["../../proto"])?;
    std::fs::write(&descriptors, set.encode_to_vec())?;
    let mut code = CodeGenConfig::default();
    // `Bytes`, so that a client sends its payload without a copy.
    code.bytes_fields.push((".".to_owned(), BytesRepr::Bytes));
    code.generate_json = false;
    connectrpc_build::Config::new()
        .buffa_config(code)
        .descriptor_set(descriptors)
        .files(&["transfer.proto"])
        .include_file("_connectrpc.rs")
        .compile()?;
    Ok(())
}
