//! The gRPC service of a device.

use std::sync::{Arc, Weak};

use tonic::{Request, Response, Status};

use super::accept::{self, Answers, VERSION};
use super::caller::Caller;
use super::device::{Offered, Shared};
use super::lock;
use super::proto::tensor_device_server::TensorDevice;
use super::proto::{
    AttachReply, AttachRequest, ConfirmReply, ConfirmRequest, DescribeReply, DescribeRequest, Kind, Link,
    Offered as OfferedReply, OpenRequest,
};

/// See the module's documentation.
pub(super) struct Service {
    shared: Weak<Shared>,
}

impl Service {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
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
        let mut offered: Vec<_> =
            lock(&shared.offered).iter().filter_map(|(name, offered)| describe(name, offered)).collect();
        offered.sort_by(|one, other| one.name.cmp(&other.name));
        let living = shared.links();
        let links = living.iter().map(|link| {
            let moved = link.ports().map(|port| port.moved());
            let (bytes_written, bytes_read) = moved.fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1));
            Link {
                peer: link.peer().to_string(),
                provider: link.provider().into(),
                device: link.device().into(),
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

fn describe(name: &str, offered: &Offered) -> Option<OfferedReply> {
    let name = name.to_owned();
    Some(match offered {
        Offered::Region(export) => {
            let export = export.upgrade()?;
            OfferedReply {
                name,
                kind: Kind::Region.into(),
                length: export.len(),
                depth: 1,
                spec: String::new(),
                arrived: export.notices(),
                attached: export.peers().join(", "),
            }
        }
        Offered::Placement(slot) => {
            let slot = slot.upgrade()?;
            OfferedReply {
                name,
                kind: slot.kind().into(),
                length: slot.payload(),
                depth: slot.depth(),
                spec: slot.spec().map(ToString::to_string).unwrap_or_default(),
                arrived: slot.arrived(),
                attached: slot.peer().unwrap_or_default(),
            }
        }
    })
}
