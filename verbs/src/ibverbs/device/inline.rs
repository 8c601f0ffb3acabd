//! How many inline bytes a device takes.

use ibverbs_sys as sys;

use super::raw_context::RawContext;

/// Returns the most inline bytes of a queue pair. Devices have no attribute for this number, so this function creates
/// queue pairs that ask for less and less.
pub(crate) fn probe_inline(raw: &RawContext) -> u32 {
    const MOST: u32 = 8192;
    let library = raw.library;
    // SAFETY:
    // - the context is open,
    // - each object is created from ones that are alive, and destroyed once, in the opposite order, and
    // - no other code knows them.
    unsafe {
        let domain = (library.alloc_pd)(raw.context.as_ptr());
        if domain.is_null() {
            return 0;
        }
        let no_channel = std::ptr::null_mut();
        let queue = (library.create_cq)(raw.context.as_ptr(), 1, std::ptr::null_mut(), no_channel, 0);
        let mut granted = 0;
        if !queue.is_null() {
            let mut asked = MOST;
            while asked > 0 {
                let mut attributes = sys::ibv_qp_init_attr {
                    send_cq: queue,
                    recv_cq: queue,
                    qp_type: sys::ibv_qp_type::IBV_QPT_RC,
                    cap: sys::ibv_qp_cap {
                        max_send_wr: 1,
                        max_recv_wr: 1,
                        max_send_sge: 1,
                        max_recv_sge: 1,
                        max_inline_data: asked,
                    },
                    ..Default::default()
                };
                let pair = (library.create_qp)(domain, &raw mut attributes);
                if !pair.is_null() {
                    granted = attributes.cap.max_inline_data;
                    let _ = (library.destroy_qp)(pair);
                    break;
                }
                asked /= 2;
            }
            let _ = (library.destroy_cq)(queue);
        }
        let _ = (library.dealloc_pd)(domain);
        granted
    }
}
