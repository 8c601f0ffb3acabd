//! Asynchronous events: news of the device that are no completion (man 3 ibv_get_async_event).

use std::ffi::c_int;
use std::io;

use ibverbs_sys as sys;

use super::Device;
use crate::Context as _;
use crate::ibverbs::posting::core::Core;
use crate::sync::lock;

/// Takes and applies all events that have come, and looks whether the device is still there. Acknowledges an event as
/// soon as it was applied, because destroying the object of the event waits for that.
pub(crate) fn handle(device: &Device) {
    while let Some(mut event) = next(device) {
        apply(device, &event);
        // SAFETY: the event came from the library, and is acknowledged once.
        unsafe { (device.library().ack_async_event)(&raw mut event) };
    }
    if device.has_vanished() {
        remove(device, &format!("{}: the device was removed", device.attributes().name));
    }
}

fn next(device: &Device) -> Option<sys::ibv_async_event> {
    let mut event = sys::ibv_async_event {
        element: sys::ibv_async_event__bindgen_ty_1 { port_num: 0 },
        event_type: sys::IBV_EVENT_COMM_EST,
    };
    // SAFETY: the context is open, and the structure writable.
    let result = unsafe { (device.library().get_async_event)(device.context(), &raw mut event) };
    if result == 0 {
        return Some(event);
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
        // The kernel took the device away: its descriptors are dead.
        _ => remove(device, &format!("the device was removed ({error})")),
    }
    None
}

fn apply(device: &Device, event: &sys::ibv_async_event) {
    let name = &device.attributes().name;
    match event.event_type {
        sys::IBV_EVENT_QP_FATAL | sys::IBV_EVENT_QP_REQ_ERR | sys::IBV_EVENT_QP_ACCESS_ERR => {
            // SAFETY: these events carry a queue pair, which is not destroyed before they are acknowledged.
            let number = unsafe { (*event.element.qp).qp_num };
            let what = match event.event_type {
                sys::IBV_EVENT_QP_REQ_ERR => "an invalid request of the peer",
                sys::IBV_EVENT_QP_ACCESS_ERR => "a forbidden access of the peer",
                _ => "a fatal error of the queue pair",
            };
            if let Some(pair) = lock(&device.pairs).get(&number) {
                pair.fail(|| format!("{name}: {what}"));
            }
        }
        sys::IBV_EVENT_QP_LAST_WQE_REACHED => {
            // SAFETY: this event carries a queue pair, which is not destroyed before it is acknowledged.
            let number = unsafe { (*event.element.qp).qp_num };
            if let Some(pair) = lock(&device.pairs).get(&number) {
                pair.last_receive_reached();
            }
        }
        sys::IBV_EVENT_CQ_ERR => {
            // SAFETY: this event carries a completion queue, which is not destroyed before it is acknowledged.
            let queue = unsafe { event.element.cq };
            fail(device, |pair| pair.completes_on(queue), &format!("{name}: a completion queue overran"));
        }
        sys::IBV_EVENT_PORT_ERR => {
            // SAFETY: this event carries the number of a port.
            let port: c_int = unsafe { event.element.port_num };
            if port == i32::from(device.port) {
                fail(device, |_| true, &format!("{name}: port {port} went down"));
            }
        }
        sys::IBV_EVENT_DEVICE_FATAL => remove(device, &format!("{name}: the device failed, or was removed")),
        sys::IBV_EVENT_GID_CHANGE | sys::IBV_EVENT_LID_CHANGE | sys::IBV_EVENT_PKEY_CHANGE => {
            tracing::info!(device = %name, event = event.event_type, "an address of the port has changed");
        }
        other => tracing::debug!(device = %name, event = other, "asynchronous event"),
    }
}

/// Marks the device as removed, and moves its queue pairs to Error: it will complete nothing any more.
fn remove(device: &Device, reason: &str) {
    if !device.is_removed() {
        tracing::warn!(device = %device.attributes().name, reason, "a device is gone");
    }
    device.set_removed();
    fail(device, |_| true, reason);
}

fn fail(device: &Device, concerned: impl Fn(&Core) -> bool, reason: &str) {
    for pair in lock(&device.pairs).values().filter(|pair| concerned(pair)) {
        pair.fail(|| reason.to_owned());
    }
}
