//! The gRPC service of a device.

use std::sync::{Arc, Weak};

use tonic::{Request, Response, Status};

use crate::control::accept::{self, Answers};
use crate::control::caller::Caller;
use crate::control::conversions::VERSION;
use crate::control::proto::tensor_device_server::TensorDevice;
use crate::control::proto::{
    AttachReply, AttachRequest, ConfirmReply, ConfirmRequest, DescribeReply, DescribeRequest, Link,
    OpenRequest,
};
use crate::device::shared::Shared;

/// The service. It answers while the device exists.
pub(crate) struct Service {
    shared: Weak<Shared>,
}

impl Service {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::downgrade(shared) }
    }

    fn shared(&self) -> Result<Arc<Shared>, Status> {
        self.shared.upgrade().ok_or_else(|| Status::unavailable("the tensor device has been closed"))
    }
}

#[tonic::async_trait]
impl TensorDevice for Service {
    type OpenStream = Answers;

    async fn open(&self, request: Request<OpenRequest>) -> Result<Response<Answers>, Status> {
        let caller = Caller::of(request.extensions());
        let shared = self.shared()?;
        Ok(Response::new(accept::open(&shared, request.into_inner(), caller).await?))
    }

    async fn confirm(&self, request: Request<ConfirmRequest>) -> Result<Response<ConfirmReply>, Status> {
        let caller = Caller::of(request.extensions());
        Ok(Response::new(accept::confirm(&*self.shared()?, request.get_ref(), &caller)?))
    }

    async fn attach(&self, request: Request<AttachRequest>) -> Result<Response<AttachReply>, Status> {
        let caller = Caller::of(request.extensions());
        Ok(Response::new(accept::attach(&*self.shared()?, request.get_ref(), &caller)?))
    }

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeReply>, Status> {
        let shared = self.shared()?;
        if !shared.settings.listed {
            return Err(Status::permission_denied("this tensor device does not list its regions and slots"));
        }
        let mut offered: Vec<_> =
            shared.offered().into_iter().map(|(name, offered)| offered.describe(&name)).collect();
        offered.sort_by(|one, other| one.name.cmp(&other.name));
        let living = shared.links();
        let links = living.iter().map(|link| {
            let moved = link.ports().map(|port| port.moved());
            let (bytes_written, bytes_read) = moved.fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1));
            Link {
                peer: link.peer.to_string(),
                provider: link.provider.into(),
                device: link.device.to_string(),
                queue_pairs: link.ports().count() as u32,
                bytes_written,
                bytes_read,
            }
        });
        Ok(Response::new(DescribeReply {
            versions: vec![VERSION],
            software: concat!("tonic-rdma ", env!("CARGO_PKG_VERSION")).into(),
            offered,
            links: links.collect(),
        }))
    }
}
