//! A tensor device for stock clients.

use tonic_rdma::Config;
use tonic_rdma_tensor::{Dtype, RdmaDevice, Rights, Shape, TensorSpec};

use crate::output;
use tonic_rdma_commands::Failure;

/// Serves a device with a region and two slots, one of which has received a tensor. Prints the port, and runs without end.
pub(crate) async fn serve() -> Result<(), Failure> {
    offer().await.map_err(Failure::from)
}

async fn offer() -> Result<(), Box<dyn std::error::Error>> {
    let settings = RdmaDevice::builder().queue_pairs_per_peer(2).config(Config::from_env()?);
    let device = settings.clone().bind("127.0.0.1:0").await?;
    let _parameters = device.export("parameters", device.allocate(1 << 20)?, Rights::READ_WRITE)?;
    let weights = TensorSpec::new(Dtype::F32, Shape::new(&[1024, 1000])?)?;
    let mut receiver = device.static_receiver("weights", &weights, 2)?;
    let _activations = device.dynamic_receiver("activations", 4)?;

    let worker = settings.bind("127.0.0.1:0").await?;
    let channel = worker.channel(&device.endpoint(), 0).await?;
    let mut sender = channel.static_sender("weights", &weights).await?;
    let region = worker.allocate(weights.bytes().unwrap_or(0) as usize)?;
    let (sent, arrived) = tokio::join!(sender.send_region(region), receiver.recv());
    sent?;
    drop(arrived?);

    output::line(&device.local_addr().map_or(0, |address| address.port()).to_string())?;
    std::future::pending().await
}
