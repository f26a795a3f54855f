//! The matrix unit of some x86-64 processors (AMX): eight tile registers of up to 16 rows of 64 bytes, and one
//! instruction that multiplies two of them and adds to a third.
//!
//! Rust has no stable intrinsics for it, but its assembler knows the instructions.

/// True when this machine has tiles and the products of bytes and of bfloat16, and the system lets this process use them.
pub fn is_supported() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    {
        use std::sync::OnceLock;
        static SUPPORTED: OnceLock<bool> = OnceLock::new();
        *SUPPORTED.get_or_init(|| unit::is_present() && unit::is_granted())
    }
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    {
        false
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) use unit::{AttentionTiles, PRODUCT, Planes, TILE_COLUMNS, TILE_ROWS, Tiles};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod unit {
    use std::arch::{
        asm,
        x86_64::{__cpuid, __cpuid_count, _xgetbv},
    };

    /// Most rows of activations in a product.
    pub const TILE_ROWS: usize = 16;
    /// 8-bit columns that one instruction sums over.
    pub const TILE_COLUMNS: usize = 64;
    /// Integers of a product.
    pub const PRODUCT: usize = TILE_ROWS * 16;

    /// Of the request for a state component, and the component that tile data is.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;

    /// True when the processor has the unit and the system saves its state.
    pub fn is_present() -> bool {
        let has_xsave = __cpuid(1).ecx >> 27 & 1 == 1;
        let features = __cpuid_count(7, 0).edx;
        let has_tiles_and_bytes = features >> 24 & 0b11 == 0b11;
        let has_bf16 = features >> 22 & 1 == 1;
        has_xsave && has_tiles_and_bytes && has_bf16 && {
            // SAFETY: the system has switched XSAVE on.
            let saved = unsafe { saved_state() };
            saved >> 17 & 0b11 == 0b11
        }
    }

    #[target_feature(enable = "xsave")]
    unsafe fn saved_state() -> u64 {
        // SAFETY: register 0 exists wherever XSAVE does.
        unsafe { _xgetbv(0) }
    }

    /// Asks for the right to use tile data, once for the whole process; later threads inherit it.
    pub fn is_granted() -> bool {
        // SAFETY: the call changes only what this process may do.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }

    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    impl Configuration {
        /// Sums in tiles 0 to 3, activations in 4 and 5, weights in 6 and 7.
        const fn new(activation_rows: usize) -> Configuration {
            let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
            let mut tile = 0;
            while tile < 8 {
                row_bytes[tile] = 64;
                rows[tile] = if tile < 6 { activation_rows as u8 } else { 16 };
                tile += 1;
            }
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
        }
    }

    macro_rules! load {
        ($tile:literal, $from:expr, $stride:expr) => {
            asm!(
                concat!("tileloadd ", $tile, ", [{from} + {stride}*1]"),
                from = in(reg) $from,
                stride = in(reg) $stride,
                options(nostack, preserves_flags, readonly),
            )
        };
    }

    macro_rules! multiply {
        ($index:expr, $a:literal, $b:literal) => {
            match $index {
                0 => asm!(concat!("tdpbf16ps tmm0, ", $a, ", ", $b), options(nostack, preserves_flags, nomem)),
                1 => asm!(concat!("tdpbf16ps tmm1, ", $a, ", ", $b), options(nostack, preserves_flags, nomem)),
                2 => asm!(concat!("tdpbf16ps tmm2, ", $a, ", ", $b), options(nostack, preserves_flags, nomem)),
                _ => asm!(concat!("tdpbf16ps tmm3, ", $a, ", ", $b), options(nostack, preserves_flags, nomem)),
            }
        };
    }

    /// This thread's tile registers, configured; given back when dropped, since their state slows the switch to another
    /// thread.
    pub struct Tiles(());

    /// 64 columns of both planes of rows of activations.
    #[derive(Debug, Clone, Copy)]
    pub struct Planes {
        /// The first row's upper plane; the lower one follows 128 bytes after it.
        pub start: *const u8,
        /// Bytes from one row to the next.
        pub stride: usize,
    }

    impl Tiles {
        /// Configures the registers of the calling thread for products of 1 to 16 rows.
        ///
        /// # Safety
        /// The unit [is supported](super::is_supported), and this thread has no other `Tiles`.
        pub unsafe fn configure(rows: usize) -> Tiles {
            debug_assert!((1..=TILE_ROWS).contains(&rows));
            let configuration = Configuration::new(rows);
            // SAFETY: by the contract; the configuration is valid and no compiled code uses tiles.
            unsafe { asm!("ldtilecfg [{}]", in(reg) &configuration, options(nostack, preserves_flags, readonly)) };
            Tiles(())
        }
    }

    const _: () = assert!(PRODUCT * 4 == 1024, "the distance between products below");

    impl Tiles {
        /// Clears the sums of both planes for one (`PAIR` false) or two tiles of weights.
        #[inline(always)]
        pub fn clear<const PAIR: bool>(&self) {
            // SAFETY: the tiles are configured.
            unsafe {
                asm!("tilezero tmm0", "tilezero tmm1", options(nostack, preserves_flags, nomem));
                if PAIR {
                    asm!("tilezero tmm2", "tilezero tmm3", options(nostack, preserves_flags, nomem));
                }
            }
        }

        /// Adds the products of 64 columns of signed bytes, of both planes with each tile of weights, to the sums.
        ///
        /// Weights are `[column / 4][output][column % 4]`.
        ///
        /// # Safety
        /// 64 bytes are readable at each configured row of both planes and 1024 at each of the weights.
        #[inline(always)]
        pub unsafe fn multiply<const PAIR: bool>(&self, planes: Planes, weights: [*const u8; 2]) {
            // SAFETY: by the contract; the tiles are configured for these shapes.
            unsafe {
                asm!(
                    "tileloadd tmm6, [{weights} + {row}*1]",
                    "tileloadd tmm4, [{planes} + {stride}*1]",
                    "tdpbssd tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{planes} + {stride}*1 + 128]",
                    "tdpbssd tmm1, tmm5, tmm6",
                    planes = in(reg) planes.start,
                    stride = in(reg) planes.stride,
                    weights = in(reg) weights[0],
                    row = in(reg) 64usize,
                    options(nostack, preserves_flags, readonly),
                );
                if PAIR {
                    asm!(
                        "tileloadd tmm7, [{weights} + {row}*1]",
                        "tdpbssd tmm2, tmm4, tmm7",
                        "tdpbssd tmm3, tmm5, tmm7",
                        weights = in(reg) weights[1],
                        row = in(reg) 64usize,
                        options(nostack, preserves_flags, readonly),
                    );
                }
            }
        }

        /// Writes the sums of the upper plane, then of the lower one, then the same of the second tile, each a product
        /// `[row][output]` of [`PRODUCT`] integers.
        ///
        /// # Safety
        /// Two or four products are writable at `products`.
        #[inline(always)]
        pub unsafe fn store<const PAIR: bool>(&self, products: *mut i32) {
            // SAFETY: by the contract.
            unsafe {
                asm!(
                    "tilestored [{products} + {row}*1], tmm0",
                    "tilestored [{products} + {row}*1 + 1024], tmm1",
                    products = in(reg) products,
                    row = in(reg) 64usize,
                    options(nostack, preserves_flags),
                );
                if PAIR {
                    asm!(
                        "tilestored [{products} + {row}*1 + 2048], tmm2",
                        "tilestored [{products} + {row}*1 + 3072], tmm3",
                        products = in(reg) products,
                        row = in(reg) 64usize,
                        options(nostack, preserves_flags),
                    );
                }
            }
        }
    }

    /// The tile registers as attention uses them, in bfloat16; otherwise as [`Tiles`].
    ///
    /// A product of two pairs is a chain of fused multiply-adds of the even elements from 0, one of the odd ones, then
    /// both are added, and the result to the sum; subnormal numbers are zeros.
    pub struct AttentionTiles(());

    impl AttentionTiles {
        /// Sums in tiles 0 to 3, queries in 4, keys in 5, probabilities in 6, values in 7.
        const fn configuration(rows: u8) -> Configuration {
            let (mut row_bytes, mut tile_rows) = ([0; 16], [0; 16]);
            let mut tile = 0;
            while tile < 8 {
                row_bytes[tile] = 64;
                tile_rows[tile] = rows;
                tile += 1;
            }
            tile_rows[5] = 16;
            row_bytes[6] = 32;
            tile_rows[7] = 8;
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows: tile_rows }
        }

        /// Configures the registers of the calling thread for 1 to 16 rows of queries.
        ///
        /// # Safety
        /// The unit [is supported](super::is_supported), and this thread has no other tiles.
        pub unsafe fn configure(rows: usize) -> AttentionTiles {
            debug_assert!((1..=TILE_ROWS).contains(&rows));
            let configuration = AttentionTiles::configuration(rows as u8);
            // SAFETY: by the contract; the configuration is valid and no compiled code uses tiles.
            unsafe { asm!("ldtilecfg [{}]", in(reg) &configuration, options(nostack, preserves_flags, readonly)) };
            AttentionTiles(())
        }

        /// Clears the four sums.
        #[inline(always)]
        pub fn clear(&self) {
            // SAFETY: the tiles are configured.
            unsafe {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    options(nostack, preserves_flags, nomem)
                );
            }
        }

        /// Loads 32 dimensions of the queries, rows `stride` bytes apart.
        ///
        /// # Safety
        /// 64 bytes are readable at each row.
        #[inline(always)]
        pub unsafe fn load_queries(&self, from: *const u16, stride: usize) {
            // SAFETY: by the contract.
            unsafe { load!("tmm4", from, stride) };
        }

        /// Adds the products with 32 dimensions of 16 keys, `[16 pairs][16][2]`, to sum `INDEX`.
        ///
        /// # Safety
        /// 1024 bytes are readable.
        #[inline(always)]
        pub unsafe fn add_scores<const INDEX: usize>(&self, keys: *const u16) {
            // SAFETY: by the contract.
            unsafe {
                load!("tmm5", keys, 64usize);
                multiply!(INDEX, "tmm4", "tmm5");
            }
        }

        /// Loads the probabilities of 16 positions, rows `stride` bytes apart.
        ///
        /// # Safety
        /// 32 bytes are readable at each row.
        #[inline(always)]
        pub unsafe fn load_probabilities(&self, from: *const u16, stride: usize) {
            // SAFETY: by the contract.
            unsafe { load!("tmm6", from, stride) };
        }

        /// Adds the products with 16 dimensions of 16 values, `[8 pairs][16][2]`, pairs `stride` bytes apart, to sum
        /// `INDEX`.
        ///
        /// # Safety
        /// 64 bytes are readable at each pair.
        #[inline(always)]
        pub unsafe fn add_values<const INDEX: usize>(&self, values: *const u16, stride: usize) {
            // SAFETY: by the contract.
            unsafe {
                load!("tmm7", values, stride);
                multiply!(INDEX, "tmm6", "tmm7");
            }
        }

        /// Writes 16 columns of sum `INDEX`, rows `stride` bytes apart.
        ///
        /// # Safety
        /// 64 bytes are writable at each row.
        #[inline(always)]
        pub unsafe fn store<const INDEX: usize>(&self, to: *mut f32, stride: usize) {
            macro_rules! store {
                ($tile:literal) => {
                    asm!(
                        concat!("tilestored [{to} + {stride}*1], ", $tile),
                        to = in(reg) to,
                        stride = in(reg) stride,
                        options(nostack, preserves_flags),
                    )
                };
            }
            // SAFETY: by the contract.
            unsafe {
                match INDEX {
                    0 => store!("tmm0"),
                    1 => store!("tmm1"),
                    2 => store!("tmm2"),
                    _ => store!("tmm3"),
                }
            }
        }
    }

    impl Drop for AttentionTiles {
        fn drop(&mut self) {
            // SAFETY: the thread has them configured.
            unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
        }
    }

    impl Drop for Tiles {
        fn drop(&mut self) {
            // SAFETY: the thread has them configured.
            unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
        }
    }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn products_equal_the_sums_of_their_terms() {
        if !is_supported() {
            return;
        }
        const STRIDE: usize = 320;
        let activations: Vec<i8> = (0..TILE_ROWS * STRIDE).map(|i| (i * 37 % 255) as i8).collect();
        let weights: Vec<i8> = (0..4 * 1024).map(|i| (i * 91 % 251) as i8).collect();
        let sum = |row: usize, plane: usize, tile: usize, output: usize, steps: usize| -> i32 {
            let term = |k: usize| {
                let weight = weights[tile * 2048 + k / 4 * 64 + output * 4 + k % 4];
                i32::from(activations[row * STRIDE + plane * 128 + k]) * i32::from(weight)
            };
            (0..steps * TILE_COLUMNS).map(term).sum()
        };
        for rows in [1, 7, 16] {
            for (pair, steps) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
                let mut products = vec![i32::MIN; 4 * PRODUCT];
                let planes = Planes { start: activations.as_ptr().cast(), stride: STRIDE };
                let starts = [weights.as_ptr().cast(), weights[2048..].as_ptr().cast()];
                // SAFETY: supported; the buffers have the sizes.
                unsafe {
                    let tiles = Tiles::configure(rows);
                    if pair {
                        tiles.clear::<true>();
                    } else {
                        tiles.clear::<false>();
                    }
                    for step in 0..steps {
                        let planes = Planes { start: planes.start.add(step * TILE_COLUMNS), ..planes };
                        let weights = starts.map(|start: *const u8| start.add(step * 1024));
                        if pair {
                            tiles.multiply::<true>(planes, weights);
                        } else {
                            tiles.multiply::<false>(planes, weights);
                        }
                    }
                    if pair {
                        tiles.store::<true>(products.as_mut_ptr());
                    } else {
                        tiles.store::<false>(products.as_mut_ptr());
                    }
                }
                for (index, found) in products.into_iter().enumerate() {
                    let (product, row, output) = (index / PRODUCT, index % PRODUCT / 16, index % 16);
                    let is_written = row < rows && (pair || product < 2);
                    let expected =
                        if is_written { sum(row, product % 2, product / 2, output, steps) } else { i32::MIN };
                    assert_eq!(found, expected, "{rows} rows, {steps} steps, pair {pair}, element {index}");
                }
            }
        }
    }
}
