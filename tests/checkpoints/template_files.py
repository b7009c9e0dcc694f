"""Files that ComfyUI's templates (0.11.97) and Comfy-Org's repositories name for our families, with their models.

Written by hand, from the templates' notes and the repositories that they link to. Text encoders are not in it: a loader
of these is known by its type.
"""

import re
from collections.abc import Mapping

# What a file of one of our families is called, also one that computes otherwise.
FAMILY = re.compile(
    r"wan[_.\d-]|wan21|qwen.?image|flux.?2|klein|z.?image|hunyuan.?video|cogvideo|clip_vision_h|sigclip", re.I
)

# Of several models that share a file the first.
OURS: Mapping[str, str] = {
    "wan2.1_t2v_14B_bf16": "wan2.1-t2v-14b",
    "wan2.1_t2v_14B_fp16": "wan2.1-t2v-14b",
    "wan2.1_t2v_14B_fp8_e4m3fn": "wan2.1-t2v-14b",
    "wan2.1_t2v_14B_fp8_scaled": "wan2.1-t2v-14b",
    "wan2.1_t2v_1.3B_bf16": "wan2.1-t2v-1.3b",
    "wan2.1_t2v_1.3B_fp16": "wan2.1-t2v-1.3b",
    "wan2.1_i2v_480p_14B_bf16": "wan2.1-i2v-14b-480p",
    "wan2.1_i2v_480p_14B_fp16": "wan2.1-i2v-14b-480p",
    "wan2.1_i2v_480p_14B_fp8_e4m3fn": "wan2.1-i2v-14b-480p",
    "wan2.1_i2v_480p_14B_fp8_scaled": "wan2.1-i2v-14b-480p",
    "Wan2_1-I2V-14B-480p_fp8_e4m3fn_scaled_KJ": "wan2.1-i2v-14b-480p",
    "wan2.1_i2v_720p_14B_bf16": "wan2.1-i2v-14b-720p",
    "wan2.1_i2v_720p_14B_fp16": "wan2.1-i2v-14b-720p",
    "wan2.1_i2v_720p_14B_fp8_e4m3fn": "wan2.1-i2v-14b-720p",
    "wan2.1_i2v_720p_14B_fp8_scaled": "wan2.1-i2v-14b-720p",
    "wan2.1_flf2v_720p_14B_bf16": "wan2.1-flf2v-14b-720p",
    "wan2.1_flf2v_720p_14B_fp16": "wan2.1-flf2v-14b-720p",
    "wan2.1_flf2v_720p_14B_fp8_e4m3fn": "wan2.1-flf2v-14b-720p",
    "wan2.1_flf2v_720p_14B_fp8_scaled": "wan2.1-flf2v-14b-720p",
    "wan2.2_t2v_high_noise_14B_fp16": "wan2.2-t2v-a14b",
    "wan2.2_t2v_low_noise_14B_fp16": "wan2.2-t2v-a14b",
    "wan2.2_t2v_high_noise_14B_fp8_scaled": "wan2.2-t2v-a14b",
    "wan2.2_t2v_low_noise_14B_fp8_scaled": "wan2.2-t2v-a14b",
    "wan2.2_t2v_high_noise_14B_int8_convrot": "wan2.2-t2v-a14b",
    "wan2.2_t2v_low_noise_14B_int8_convrot": "wan2.2-t2v-a14b",
    "wan2.2_i2v_high_noise_14B_fp16": "wan2.2-i2v-a14b",
    "wan2.2_i2v_low_noise_14B_fp16": "wan2.2-i2v-a14b",
    "wan2.2_i2v_high_noise_14B_fp8_scaled": "wan2.2-i2v-a14b",
    "wan2.2_i2v_low_noise_14B_fp8_scaled": "wan2.2-i2v-a14b",
    "wan2.2_i2v_high_noise_14B_int8_convrot": "wan2.2-i2v-a14b",
    "wan2.2_i2v_low_noise_14B_int8_convrot": "wan2.2-i2v-a14b",
    "wan2.2_ti2v_5B_fp16": "wan2.2-ti2v-5b",
    "wan2.2_vae": "wan2.2-ti2v-5b",
    "wan_2.1_vae": "wan2.1-t2v-14b",
    "Wan2_1_VAE_bf16": "wan2.1-t2v-14b",
    "clip_vision_h": "wan2.1-i2v-14b-480p",
    "flux2_dev_fp8mixed": "flux2-dev",
    "flux2-vae": "flux2-dev",
    "full_encoder_small_decoder": "flux2-dev",
    "flux-2-klein-4b": "flux2-klein-4b",
    "flux-2-klein-4b-fp8": "flux2-klein-4b",
    "flux-2-klein-base-4b": "flux2-klein-base-4b",
    "flux-2-klein-base-4b-fp8": "flux2-klein-base-4b",
    "flux-2-klein-9b": "flux2-klein-9b",
    "flux-2-klein-9b-fp8": "flux2-klein-9b",
    "flux-2-klein-base-9b": "flux2-klein-base-9b",
    "flux-2-klein-base-9b-fp8": "flux2-klein-base-9b",
    "z_image_turbo_bf16": "z-image-turbo",
    "z_image_turbo_int8_convrot": "z-image-turbo",
    "z_image_bf16": "z-image",
    "z_image_int8_convrot": "z-image",
    "ae": "z-image-turbo",
    "qwen_image_bf16": "qwen-image-2512",
    "qwen_image_fp8_e4m3fn": "qwen-image-2512",
    "qwen_image_2512_bf16": "qwen-image-2512",
    "qwen_image_2512_fp8_e4m3fn": "qwen-image-2512",
    "qwen_image_vae": "qwen-image-2512",
    "qwen_image_edit_bf16": "qwen-image-edit-2511",
    "qwen_image_edit_fp8_e4m3fn": "qwen-image-edit-2511",
    "qwen_image_edit_2509_bf16": "qwen-image-edit-2511",
    "qwen_image_edit_2509_fp8_e4m3fn": "qwen-image-edit-2511",
    "qwen_image_edit_2509_fp8mixed": "qwen-image-edit-2511",
    "qwen_image_edit_2509_int8_convrot": "qwen-image-edit-2511",
    "qwen_image_edit_2511_bf16": "qwen-image-edit-2511",
    "qwen_image_edit_2511_fp8mixed": "qwen-image-edit-2511",
    "qwen_image_edit_2511_int8_convrot": "qwen-image-edit-2511",
    "hunyuanvideo1.5_720p_t2v_fp16": "hunyuanvideo1.5-t2v-720p",
    "hunyuanvideo1.5_720p_i2v_fp16": "hunyuanvideo1.5-i2v-720p",
    "hunyuanvideo1.5_480p_t2v_fp16": "hunyuanvideo1.5-t2v-480p",
    "hunyuanvideo1.5_480p_i2v_fp16": "hunyuanvideo1.5-i2v-480p",
    "hunyuanvideo1.5_480p_t2v_cfg_distilled_fp16": "hunyuanvideo1.5-t2v-480p-distilled",
    "hunyuanvideo1.5_480p_t2v_cfg_distilled_fp8_scaled": "hunyuanvideo1.5-t2v-480p-distilled",
    "hunyuanvideo1.5_480p_i2v_cfg_distilled_fp16": "hunyuanvideo1.5-i2v-480p-distilled",
    "hunyuanvideo1.5_480p_i2v_cfg_distilled_fp8_scaled": "hunyuanvideo1.5-i2v-480p-distilled",
    "hunyuanvideo1.5_720p_i2v_cfg_distilled_fp16": "hunyuanvideo1.5-i2v-720p-distilled",
    "hunyuanvideo1.5_720p_i2v_cfg_distilled_fp8_scaled": "hunyuanvideo1.5-i2v-720p-distilled",
    "hunyuanvideo1.5_480p_i2v_step_distilled_fp16": "hunyuanvideo1.5-i2v-480p-step-distilled",
    "hunyuanvideo1.5_480p_i2v_step_distilled_fp8_scaled": "hunyuanvideo1.5-i2v-480p-step-distilled",
    "hunyuanvideo15_vae_fp16": "hunyuanvideo1.5-t2v-720p",
    "sigclip_vision_patch14_384": "hunyuanvideo1.5-i2v-720p",
    "CogVideoX_1_5_5b_T2V_bf16": "cogvideox1.5-5b",
    "CogVideoX_1_5_5b_I2V_bf16": "cogvideox1.5-5b-i2v",
    "cogvideox_vae_bf16": "cogvideox1.5-5b",
}

# Networks that run beside a denoiser.
CONTROLS = (
    "Z-Image-Turbo-Fun-Controlnet-Union", "Qwen-Image-InstantX-ControlNet-Union",
    "Qwen-Image-InstantX-ControlNet-Inpainting", "Qwen-Image-2512-Fun-Controlnet-Union-2602",
    "qwen_image_canny_diffsynth_controlnet", "qwen_image_depth_diffsynth_controlnet",
    "qwen_image_inpaint_diffsynth_controlnet",
)  # fmt: skip

# By the reason: other networks, others' weights that a file's header has to tell, and other families by a like name.
NOT_OURS: Mapping[str, tuple[str, ...]] = {
    "control, camera and masks beside the latents": (
        "wan2.1_fun_camera_v1.1_1.3B_bf16", "wan2.1_fun_camera_v1.1_14B_bf16", "wan2.1_fun_control_1.3B_bf16",
        "wan2.1_fun_inp_1.3B_bf16", "wan2.2_fun_camera_high_noise_14B_fp8_scaled",
        "wan2.2_fun_camera_low_noise_14B_fp8_scaled", "wan2.2_fun_control_5B_bf16",
        "wan2.2_fun_control_high_noise_14B_fp8_scaled", "wan2.2_fun_control_low_noise_14B_fp8_scaled",
        "wan2.2_fun_inpaint_5B_bf16", "wan2.2_fun_inpaint_high_noise_14B_fp8_scaled",
        "wan2.2_fun_inpaint_low_noise_14B_fp8_scaled", "wan2.1_vace_1.3B_fp16", "wan2.1_vace_14B_fp16",
        "Wan21-WanMove_fp8_scaled_e4m3fn_KJ", "Wan2_1-I2V-ATI-14B_fp8_e4m3fn", "void_pass1", "void_pass2",
    ),
    "references, sound and poses": (
        "wan2.1_14B_SCAIL_2_fp16", "wan2.1_14B_SCAIL_2_int8_convrot", "wan2.2_bernini_r_high_noise_fp8_scaled",
        "wan2.2_bernini_r_low_noise_fp8_scaled", "wan2.2_dancer_14b_global_fp8_scaled",
        "wan2.2_dancer_14b_local_fp8_scaled", "wan2.2_s2v_14B_fp8_scaled", "wan2.2_animate_14B_bf16",
        "wan_animate_2_int8_convrot", "wan_animate_2_distill_int8_convrot", "humo_17B_fp8_e4m3fn",
        "wan2.1_infiniteTalk_multi_fp16",
    ),
    "a cache of references": ("flux-2-klein-9b-kv-fp8",),
    "layers": ("qwen_image_layered_bf16", "qwen_image_layered_control_bf16", "qwen_image_layered_vae"),
    "super-resolution": ("hunyuanvideo1.5_1080p_sr_distilled_fp16",),
    "frame by frame": ("causal_forcing-framewise",),
    "transparency": ("wan_alpha_2.1_vae_alpha_channel", "wan_alpha_2.1_vae_rgb_channel"),
    "another model by a like name": (
        "qwen_image_2.1_int8_convrot", "qwen_image_2.1_turbo_int8_convrot", "qwen_image_2.1_vae_bf16",
        "hunyuan_video_t2v_720p_bf16", "hunyuan_video_vae_bf16", "flux2-vae_small", "cogvideox_vae",
    ),
    "others' weights": ("FireRed-Image-Edit-1.1-transformer", "capybara_v0.1", "chrono_edit_14B_fp16"),
}  # fmt: skip
