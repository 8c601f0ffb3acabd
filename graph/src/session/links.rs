//! The connections over which one part sends tensors to another.

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use tonic::Code;
use tonic::transport::Endpoint;
use tonic_rdma::{Policy, RdmaChannel, RdmaConnectInfo, RdmaConnector};
use tonic_rdma_tensor::internal::meeting::{self, Key};
use tonic_rdma_tensor::{Channel, ChannelError, RdmaDevice};

use crate::error::GraphError;
use crate::placement::{Crossing, Part, Placement};
use crate::session::peering::Peering;
use crate::session::settings::{
    CONNECTION_WINDOW, MAX_FRAME, MESSAGE_MARGIN, STREAM_WINDOW, Settings, calls, setting,
};
use crate::transfer::proto::parts_client::PartsClient;
use crate::transfer::{Caller, Mode, SlotSender};

/// What is needed to connect to one part.
#[derive(Clone, Copy)]
pub(super) struct Plan<'a> {
    pub(super) settings: &'a Settings,
    pub(super) device: &'a RdmaDevice,
    pub(super) peering: &'a Peering,
    pub(super) peer: Part,
    pub(super) key: &'a Key,
}

/// What this part needs to send to another.
#[derive(Debug, Default)]
pub(super) struct Sending {
    pub(super) channel: Option<Channel>,
    pub(super) calls: Vec<(Mode, (Crossing, Caller, Bytes))>,
    pub(super) slots: Vec<(Mode, (Crossing, SlotSender))>,
}

impl Sending {
    /// Returns the number of static slots whose address is known.
    pub(super) fn static_slots(&self) -> usize {
        self.slots.iter().filter(|(_, (_, sender))| matches!(sender, SlotSender::Static(_))).count()
    }
}

/// Returns the name of a slot. The key of the sender in it is a secret, so that only the sender finds the slot.
pub(super) fn slot_name(key: &Key, mode: Mode, crossing: &Crossing) -> String {
    format!("{:032x}/{mode}/{}", u128::from_be_bytes(*key), crossing.id.0)
}

/// Makes the description of a connection to `address`: windows and frames for tensors.
pub(super) fn endpoint(peer: Part, address: &str) -> Result<Endpoint, GraphError> {
    let endpoint = meeting::endpoint("http", address);
    let endpoint =
        endpoint.map_err(|reason| setting("peers", format!("the address of part {peer}: {reason}")))?;
    Ok(endpoint
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME))
}

/// Opens the connections of all modes to a part to which this part sends.
pub(super) async fn open(plan: Plan<'_>) -> Result<Sending, GraphError> {
    let mut sending = Sending::default();
    let peering = plan.peering;
    let leaving: Vec<&Crossing> =
        peering.placements.leaving(peering.part).filter(|crossing| crossing.to == plan.peer).collect();
    if leaving.is_empty() {
        return Ok(sending);
    }
    for mode in peering.modes.iter().copied() {
        if mode.uses_slots() {
            let channel = match sending.channel.take() {
                Some(channel) => channel,
                None => channel(plan, mode).await?,
            };
            for crossing in &leaving {
                let sender = attach(plan, &channel, mode, crossing).await?;
                sending.slots.push((mode, ((*crossing).clone(), sender)));
            }
            sending.channel = Some(channel);
        } else {
            let caller = caller(plan, mode).await?;
            let key = Bytes::copy_from_slice(plan.key);
            let senders = leaving.iter().map(|it| ((*it).clone(), caller.clone(), key.clone()));
            sending.calls.extend(senders.map(|sender| (mode, sender)));
        }
    }
    Ok(sending)
}

impl Plan<'_> {
    fn address(&self) -> &str {
        self.peering.peers.get(self.peer.0).map_or("", String::as_str)
    }

    fn no_rdma(&self, mode: Mode, source: Box<dyn Error + Send + Sync>) -> GraphError {
        GraphError::NoRdma {
            mode: mode.to_string(),
            peer: self.peer.0,
            address: self.address().to_owned(),
            source,
        }
    }
}

/// Connects for calls in `mode`.
async fn caller(plan: Plan<'_>, mode: Mode) -> Result<Caller, GraphError> {
    let endpoint = endpoint(plan.peer, plan.address())?;
    let config = plan.settings.config.clone().policy(Policy::Require);
    let longest = usize::try_from(plan.settings.largest_tensor.saturating_add(MESSAGE_MARGIN));
    let longest = longest.unwrap_or(usize::MAX);
    match mode {
        Mode::GrpcNative => {
            let builder = RdmaChannel::builder(endpoint).config(config).calls(calls(plan.settings));
            let channel = builder.connect().await.map_err(|error| plan.no_rdma(mode, error.into()))?;
            let info = channel.last_connection();
            if !info.as_ref().is_some_and(|info| info.is_native()) {
                return Err(plan.no_rdma(mode, no_connection(info.as_ref())));
            }
            Ok(Caller::Native(PartsClient::new(channel).max_encoding_message_size(longest)))
        }
        Mode::GrpcRdma => {
            let connector = RdmaConnector::with_config(config);
            let connecting = endpoint.connect_with_connector(connector.clone());
            let channel = connecting.await.map_err(|error| plan.no_rdma(mode, error.into()))?;
            let info = connector.last_connection();
            if info.as_ref().and_then(RdmaConnectInfo::provider).is_none() {
                return Err(plan.no_rdma(mode, no_connection(info.as_ref())));
            }
            Ok(Caller::Http2(PartsClient::new(channel).max_encoding_message_size(longest)))
        }
        Mode::GrpcTcp | Mode::RdmaCp | Mode::RdmaZerocp => {
            let channel = endpoint.connect().await;
            let lost = |error| GraphError::PeerLost { peer: plan.peer.0, source: Box::new(error) };
            Ok(Caller::Http2(PartsClient::new(channel.map_err(lost)?).max_encoding_message_size(longest)))
        }
    }
}

/// Returns why a connection is not of the asked kind.
fn no_connection(info: Option<&RdmaConnectInfo>) -> Box<dyn Error + Send + Sync> {
    let reason = info.map_or("no connection was made", RdmaConnectInfo::reason);
    reason.into()
}

/// Opens a channel to the part's tensor device. A part that is asked by many others at once says that it is busy, and is asked again.
async fn channel(plan: Plan<'_>, mode: Mode) -> Result<Channel, GraphError> {
    loop {
        match plan.device.channel(plan.address(), 0).await {
            Ok(channel) => return Ok(channel),
            Err(ChannelError::Refused { code: Code::ResourceExhausted, .. }) => {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(5..50))).await;
            }
            Err(error @ (ChannelError::PeerLost { .. } | ChannelError::Closed(_))) => {
                return Err(GraphError::PeerLost { peer: plan.peer.0, source: Box::new(error) });
            }
            Err(error) => return Err(plan.no_rdma(mode, Box::new(error))),
        }
    }
}

/// Learns the address of a slot.
async fn attach(
    plan: Plan<'_>,
    channel: &Channel,
    mode: Mode,
    crossing: &Crossing,
) -> Result<SlotSender, GraphError> {
    let name = slot_name(plan.key, mode, crossing);
    let sender = match &crossing.placement {
        Placement::Static(spec) => channel.static_sender(&name, spec).await.map(SlotSender::Static),
        Placement::Dynamic { .. } => channel.dynamic_sender(&name).await.map(SlotSender::Dynamic),
    };
    sender.map_err(|error| match error {
        ChannelError::PeerLost { .. } | ChannelError::Closed(_) => {
            GraphError::PeerLost { peer: plan.peer.0, source: Box::new(error) }
        }
        error => crossing.failed(plan.peer, 0, error),
    })
}
